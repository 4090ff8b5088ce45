# The runtime's image for CPUs. Bundled models lie in /opt/radixfleet/models, readable by all, one folder each; the native executor's
# libraries in /opt/radixfleet/native, one for each level of vector instructions.
# Written with the layout of the repository in mind and never built here: building needs a container registry for the base image.
# Build at the root of the repository, with a folder models/ that holds the converted models (`make setup` makes them):
#   docker build -f docker/runtime.Dockerfile --build-context models=$HOME/.cache/radixfleet/models -t radixfleet/runtime:0.1.0 .
FROM python:3.11-slim-bookworm AS native
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# The build needs only the contract's dependencies.
RUN pip install --no-cache-dir . && python -m fleet_runtime.engine.native.build --to /opt/radixfleet/native && chmod -R a+rX /opt/radixfleet/native

FROM python:3.11-slim-bookworm
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir '.[runtime]' && rm -rf /src
COPY --from=native /opt/radixfleet/native /opt/radixfleet/native
COPY --from=models . /opt/radixfleet/models
RUN chmod -R a+rX /opt/radixfleet/models
WORKDIR /
USER 65534:65534
ENTRYPOINT ["radixfleet-runtime"]
