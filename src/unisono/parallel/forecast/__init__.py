"""Forecasts of a training step's time, from profiles of the model with one and with two layers."""

from unisono.parallel.forecast.step_forecast import RunBuilder, StepForecast, forecast_step

__all__ = ["RunBuilder", "StepForecast", "forecast_step"]
