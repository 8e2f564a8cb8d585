"""Agents: functions and programs that call a model. Their requests are observations."""
