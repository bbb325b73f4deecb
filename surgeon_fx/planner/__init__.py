"""The memory planner: cache size and peak of a step, predicted to the byte before anything runs."""

from surgeon_fx.planner.fit import Fit, fit
from surgeon_fx.planner.plan import Plan, PlanRow, plan

__all__ = ["Fit", "Plan", "PlanRow", "fit", "plan"]
