"""The API against its own description: whatever is asked, also nonsense, it answers what it says it answers."""

import http

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from memoire.nodes.http import NodePages
from pageskit import three_actors, watch

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

requests = pytest.importorskip("requests", reason="schemathesis brings it")
not_a_server_error = pytest.importorskip("schemathesis.checks").not_a_server_error
negative_data_rejection = pytest.importorskip("schemathesis.specs.openapi.checks").negative_data_rejection

pytestmark = [
    # On a busy machine a dashboard may end before it has closed what a client of thousands of questions keeps open.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

EXAMPLES = 15
MAX_REQUEST = 16 << 10
"""Bytes of a request line and headers that the dashboard's server takes."""


@pytest.fixture(scope="module")
def described(shared_cluster):
    """What the API says of itself, while it answers for a server that has something to show."""
    server = shared_cluster.server(name="home", run="r-1")
    three_actors(shared_cluster, server, "")
    with NodePages("127.0.0.1:0", server) as pages, watch(pages, steps=120) as board:
        yield schemathesis.openapi.from_url(f"{board.url}/api/openapi.json")


ENDLESS = "/api/stream"


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_every_answer_is_as_it_is_described(described, mode):
    tried = []
    for found in described.get_all_operations():
        operation = found.ok()
        if operation.path == ENDLESS:
            continue
        if mode.is_negative and not list(operation.iter_parameters()) and not operation.body:
            continue  # nothing that could be wrong

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # to make a finding smaller takes minutes
            suppress_health_check=list(HealthCheck),
        )
        def ask(case):
            try:
                answer = case.call(timeout=100.0)
            except requests.exceptions.RequestException:
                # Who asks for more than fits into a request is told so and hung up on, perhaps before he has heard it.
                if len(case.as_curl_command()) < MAX_REQUEST:
                    raise
                return
            # A node that is busy with something else does not answer in time: nothing that the API could help.
            excused = [not_a_server_error] if answer.status_code == http.HTTPStatus.BAD_GATEWAY else []
            if answer.status_code == http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE:  # a refusal, whatever else is wrong
                excused = [negative_data_rejection]
            case.validate_response(answer, excluded_checks=excused)

        ask()
        tried.append(operation.path)
    assert len(tried) >= 12
