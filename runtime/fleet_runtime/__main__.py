import sys, http.server, signal, threading
def main():
    print(sys.argv, flush=True)
    class H(http.server.BaseHTTPRequestHandler):
        def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
        def log_message(self,*a): pass
    s = http.server.ThreadingHTTPServer(("0.0.0.0", 8001), H)
    signal.signal(signal.SIGTERM, lambda *a: threading.Thread(target=s.shutdown).start())
    s.serve_forever()
