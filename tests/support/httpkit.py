"""One HTTP request, as the tests of nodes' pages, of the dashboard and of browsers make it."""

import contextlib
import http.client
import urllib.parse

from netkit import DEADLINE


def ask(at, path, method="GET", headers=(), body=None):
    """(status, headers, body) of one request to a URL, or to what has one as `url`."""
    place = urllib.parse.urlsplit(getattr(at, "url", at)).netloc
    with contextlib.closing(http.client.HTTPConnection(place, timeout=DEADLINE)) as connection:
        connection.request(method, "/" + path.removeprefix("/"), body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
