"""The API of radixfleet.io as pydantic models: the single source of the CRD in `crds/`."""
