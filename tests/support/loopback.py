"""A web server on loopback that misbehaves on request."""

import http.server
import random
import socket
import threading
import time
import urllib.parse
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Site:
    """What the server has and does.

    Attributes:
        files: path (without the first slash) → content.
        ranges: answers Range requests.
        etags: sends an ETag, by path.
        cuts: path → after how many bytes each of the next answers breaks off.
        lengths: path → the Content-Length it announces instead of the right one.
        statuses: path → statuses of the next answers.
        head: answers HEAD requests.
        date: Last-Modified.
        kind: Content-Type.
        pause_s: between blocks of 16 KiB.
        cut_share, busy_share: how many of the answers break off midway, or are 503.
        rate: bytes a second, of all answers together.
        redirects: path → where it is instead.
        before: called with the path before each answer, and may change anything here.
        content_range: makes the Content-Range of start, stop and total.
        requests: (method, path, Range) as they came; headers: those of each.
    """

    files: dict = field(default_factory=dict)
    ranges: bool = True
    etags: dict = field(default_factory=dict)
    cuts: dict = field(default_factory=lambda: defaultdict(list))
    lengths: dict = field(default_factory=dict)
    statuses: dict = field(default_factory=lambda: defaultdict(list))
    head: bool = True
    date: str = ""
    kind: str = "application/octet-stream"
    pause_s: float = 0.0
    cut_share: float = 0.0
    busy_share: float = 0.0
    rate: float = 0.0
    redirects: dict = field(default_factory=dict)
    before: object = None
    content_range: object = "bytes {}-{}/{}".format
    random: object = field(default_factory=lambda: random.Random(7))
    sent: list = field(default_factory=lambda: [0.0])
    over: threading.Event = field(default_factory=threading.Event)
    headers: list = field(default_factory=list)
    requests: list = field(default_factory=list)
    url: str = ""


@contextmanager
def serve(site):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_HEAD(self):
            if not site.head:
                self.send_error(405)
                return
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            path = urllib.parse.unquote(self.path.lstrip("/").partition("?")[0])
            wanted = self.headers.get("Range")
            site.requests.append((self.command, path, wanted))
            site.headers.append({**self.headers, "path": self.path})
            if site.before is not None:
                site.before(path)
            if path in site.redirects:
                self.send_response(302)
                self.send_header("Location", site.redirects[path])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if site.random.random() < site.busy_share:
                self.send_error(503)
                return
            if body and site.statuses[path]:
                self.send_error(site.statuses[path].pop(0))
                return
            data = site.files.get(path)
            if data is None:
                self.send_error(404)
                return
            start, total = 0, len(data)
            stop = total
            tag = site.etags.get(path)
            condition = self.headers.get("If-Range")
            if wanted and site.ranges and condition in (None, tag):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, stop = int(first), min(int(last or total) + 1, total)
                if start >= total:
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{total}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", site.content_range(start, stop - 1, total))
            else:
                self.send_response(200)
            self.send_header("Content-Type", site.kind)
            self.send_header("Content-Length", str(site.lengths.get(path, stop - start)))
            if tag:
                self.send_header("ETag", tag)
            if site.date:
                self.send_header("Last-Modified", site.date)
            self.end_headers()
            if body:
                self.send(path, memoryview(data)[start:stop])

        def send(self, path, data):
            cut = site.cuts[path].pop(0) if site.cuts[path] else None
            if cut is None and site.random.random() < site.cut_share:
                cut = site.random.randrange(len(data) + 1)
            view = memoryview(data)[:cut]
            step = 262144 if site.rate else 16384
            try:
                for at in range(0, len(view), step):
                    if site.rate:
                        self.hold_back(min(step, len(view) - at))
                    self.wfile.write(view[at : at + step])
                    if site.pause_s:
                        site.over.wait(site.pause_s)
            except OSError:
                self.close_connection = True
            if cut is not None or path in site.lengths:
                self.close_connection = True

        def hold_back(self, count):
            with lock:
                site.sent[0] = max(site.sent[0], time.monotonic()) + count / site.rate
                until = site.sent[0]
            site.over.wait(max(until - time.monotonic(), 0))

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args):
            """Clients that go away are part of the tests."""

        def process_request_thread(self, request, address):
            open_ones.add(request)
            try:
                super().process_request_thread(request, address)
            finally:
                open_ones.discard(request)

    open_ones = set()
    lock = threading.Lock()
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        site.over.set()
        until = time.monotonic() + 5
        while open_ones and time.monotonic() < until:  # later tests count descriptors
            for request in list(open_ones):
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)
            time.sleep(0.002)
        thread.join()
