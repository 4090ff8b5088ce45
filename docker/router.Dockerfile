# The router's image: contract, text and router only, no torch, no operator.
# Written with the layout of the repository in mind and never built here: building needs a container registry for the base image.
# Build at the root of the repository: docker build -f docker/router.Dockerfile -t radixfleet/router:0.1.0 .
FROM python:3.11-slim-bookworm AS compiled
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir '.[router,compile]' && python -m fleet_router.compile --to /opt/radixfleet/compiled && chmod -R a+rX /opt/radixfleet/compiled

FROM python:3.11-slim-bookworm
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir '.[router]' && rm -rf /src
COPY --from=compiled /opt/radixfleet/compiled /opt/radixfleet/compiled
WORKDIR /
USER 65534:65534
ENTRYPOINT ["radixfleet-router"]
