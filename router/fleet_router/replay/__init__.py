"""Replays request logs through a model of a fleet, with the router's own deciding code and with the rules of other routers.

A program of its own (`python -m fleet_router.replay`, also `radixfleet replay`); the running router never imports it.
"""
