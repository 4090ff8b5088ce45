"""The router. Modules of its data path are compiled when a build of them is there."""

from fleet_router import compiled

compiled.use()
