"""The router. Modules of its data path are compiled when a build of them is there."""

import fleet_contract.sigterm  # noqa: F401 - before all that takes time to import
from fleet_router import compiled

compiled.use()
