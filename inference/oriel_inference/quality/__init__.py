"""Prediction quality: samples of what a model gets and answers, counted beside its requests."""
