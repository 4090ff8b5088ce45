"""An OpenTelemetry collector: a small HTTP server that decodes what it gets with OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Keeps every span that is posted to /v1/traces."""

    def __init__(self) -> None:
        self.spans: list = []  # type: ignore[type-arg]
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append({a.key: a.value.string_value for a in group.resource.attributes})
                    collector.spans += [span for scope in group.scope_spans for span in scope.spans]
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                return None

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)
