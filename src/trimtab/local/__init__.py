"""Local steps: workers train by themselves and agree on their weights every so many steps."""
