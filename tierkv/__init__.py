"""tierkv: a tiered KV-cache memory manager for LLM agents. This package is what a worker imports."""

from tierkv.client import Client, connect
from tierkv.geometry import Geometry
from tierkv.regions import Region
from tierkv.session import Session

__all__ = ["Client", "Geometry", "Region", "Session", "connect"]
