"""Moments and log-probabilities of each token's distribution, and the loss with probabilities as targets."""
