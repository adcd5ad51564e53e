"""Forecasts of the time of a training step, from a profile of one and of two layers."""

from unisono.parallel.forecast.step_forecast import RunBuilder, StepForecast, forecast_step

__all__ = ["RunBuilder", "StepForecast", "forecast_step"]
