"""Launchers of processes on machines: plans, clusters of services, Ray; checks of machines."""
