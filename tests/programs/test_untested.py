import pytest
from untested import untested


def of_test(nodeid, reason):
    return pytest.TestReport(nodeid, ("", 0, ""), {}, "skipped", ("file.py", 1, f"Skipped: {reason}"), "setup")


def of_file(nodeid, reason):
    return pytest.CollectReport(nodeid, "skipped", ("file.py", 1, f"Skipped: {reason}"), None)


def test_skipped_tests_are_one_line_of_their_reasons():
    skipped = [
        of_test("tests/programs/test_gpu.py::test_a[x]", "no CUDA device"),
        of_file("tests/metrics/test_peers.py", "Quantus is not installed"),
        of_test("tests/programs/test_gpu.py::test_b", "no CUDA device"),
        of_test("tests/programs/test_gpu.py::test_c", "one CUDA device"),
        of_test("tests/test_adapters.py::test_d", "Quantus is not installed"),
    ]
    assert untested(skipped) == (
        "not tested here: 2 of test_gpu (no CUDA device); "
        "all of test_peers, 1 of test_adapters (Quantus is not installed); 1 of test_gpu (one CUDA device)"
    )


def test_where_nothing_is_skipped_there_is_no_line():
    assert untested([]) == ""
