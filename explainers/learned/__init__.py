"""What trained explainers share when they explain: a network on features of the target, and where these come from."""

from explainers.learned.network_explainer import NetworkExplainer

__all__ = ["NetworkExplainer"]
