"""
Feature selection in scikit-learn
=================================

How few of 30 measurements tell benign from malignant tumours? ``KHotSelector`` is a transformer like any other: it is
a step of a pipeline, and a grid search chooses its number of features. It is compared with scikit-learn's
``SelectKBest``, which tests each feature alone.
"""

import matplotlib.pyplot as plt
from sklearn.datasets import load_breast_cancer
from sklearn.feature_selection import SelectKBest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from khot.sklearn import KHotSelector

# %%
# **Your data goes here:** replace `data.data`, an array (rows, features), `data.target` and `data.feature_names`.
data = load_breast_cancer()
X_train, X_test, y_train, y_test = train_test_split(data.data, data.target, stratify=data.target, random_state=0)
sizes = [1, 2, 4, 8]


# %%
# Both selectors are used in the same pipeline. `KHotSelector` chooses features together, so they need not repeat each
# other.
def search(selector, parameter: str) -> GridSearchCV:
    pipeline = make_pipeline(StandardScaler(), selector, LogisticRegression())
    step = type(selector).__name__.lower()
    return GridSearchCV(pipeline, {f"{step}__{parameter}": sizes}, cv=3).fit(X_train, y_train)


searches = {}
for selector, parameter in ((KHotSelector(random_state=0), "n_features_to_select"), (SelectKBest(), "k")):
    name = type(selector).__name__
    searches[name] = found = search(selector, parameter)
    kept = found.best_estimator_[1].get_support().sum()
    print(f"{name}: {found.score(X_test, y_test):.1%} of the test set classified correctly by {kept} features")

# %%
# These are the chosen features; the figure shows the accuracy of each number of features in cross-validation.
best = searches["KHotSelector"].best_estimator_[1]
print(", ".join(data.feature_names[best.get_support()]))

figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for name, found in searches.items():
    results = found.cv_results_
    axis.errorbar(sizes, results["mean_test_score"], results["std_test_score"], fmt="o-", capsize=3, label=name)
axis.set(xlabel="features selected", ylabel="accuracy, cross-validated")
axis.legend()
figure.savefig("sklearn_pipeline.png", dpi=120)
