"""Paused sessions: 64 agents share HBM for 16 and wait for tools most of the time. Who finds what it attends to?

A discrete-event simulation of the brain itself: agents, their attention, the mover and the clock are made up, every
decision about pages is the daemon's. Agents run for some seconds, then a tool runs for a log-normal time; all arms see
the same schedule and the same attention. Contexts are short (a hundred pages), so that the recent window and the room
are scaled with them; only shares matter.
"""
