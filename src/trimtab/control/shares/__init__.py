"""Dealing out the samples of each step by batch shares."""
