"""Reading lists of records: JSON lists and JSONL, in constant memory where a line holds a record."""

import json
import re
import tracemalloc

import pytest

import utils

RECORDS = [{"query": "a", "n": [1, {"b": 2}]}, {"query": "’é\u2028"}, {}, {"query": "}, {"}]
AS_WRITTEN = "[\n" + ",\n".join(map(utils.to_json, RECORDS)) + "\n]\n"
JSONL = "\n" + "\n\n".join(map(utils.to_json, RECORDS))


def read(path):
    """The records before the first error, and the error's message, or None."""
    records = []
    try:
        for record in utils.iter_records(path):
            records.append(record)
    except utils.UserError as error:
        return records, str(error)
    return records, None


@pytest.mark.parametrize(
    "text",
    [
        AS_WRITTEN,
        JSONL,
        json.dumps(RECORDS),
        "\ufeff\n" + json.dumps(RECORDS, indent=1).replace("\n", "\r\n"),
        "[" + "\n,".join(map(json.dumps, RECORDS)) + "]",
        # the first lines hold a record each; that the others do not shows late
        "[\n" + ",\n".join(map(json.dumps, RECORDS[:2])) + ",\n\n " + json.dumps(RECORDS[2:], indent=1)[1:],
        "[\n" + ",\n".join(map(json.dumps, RECORDS)) + "]",
    ],
)
def test_records_are_read_however_the_file_is_laid_out(tmp_path, text):
    (tmp_path / "records").write_bytes(text.encode())
    records, error = read(tmp_path / "records")
    assert [record for _, record in records] == RECORDS and error is None
    if text in (AS_WRITTEN, JSONL):
        lines = text.split("\n")
        for where, record in records:
            assert json.loads(lines[int(where.rsplit(":", 1)[1]) - 1].removesuffix(",")) == record


@pytest.mark.parametrize("name", ["records.json", "records.jsonl"])
def test_a_record_a_line_is_read_in_constant_memory(tmp_path, name):
    utils.write_records(tmp_path / name, ({"text": "x" * 1000} for _ in range(12_000)))
    tracemalloc.start()
    try:
        assert sum(1 for _ in utils.iter_records(tmp_path / name)) == 12_000
        assert tracemalloc.get_traced_memory()[1] < 4 << 20  # of 12 MB
    finally:
        tracemalloc.stop()
    utils.write_records(tmp_path / name, [])
    assert (tmp_path / name).read_text() == ("" if name.endswith("l") else "[]\n")


@pytest.mark.parametrize(
    "text, whole, message",
    [
        ('[\n{"a": 1},\n{"b"', 1, ":3: .*cut off"),
        ('[\n{"a": 1},\n', 1, ":.*cut off"),
        ('[\n{"a": 1}', 1, ":.*cut off"),
        ('[{"a": 1}, {"b"', 0, ":1: .*cut off"),
        ('[\n{"a": 1}\n{"b": 2}\n]', 1, ":3: not JSON"),
        ('[\n{"a": 1},\n]', 1, ":"),
        ('[\n{"a": 1}\n]\n{"a": 1}', 1, ":4: "),
        ('[]\n{"a": 1}', 0, ":2: "),
        ('[\n{"a": 1},\n{"b": "\udcff"},\n{}]', 1, ":3: not UTF-8"),
        ('[{"a": ' * 100_000, 0, ": JSON that Python cannot read"),
        ("", 0, ": the file is empty"),
    ],
)
def test_a_list_that_is_cut_off_or_broken_is_an_error_after_its_whole_lines(tmp_path, text, whole, message):
    path = tmp_path / "records"
    path.write_bytes(text.encode(errors="surrogateescape"))
    records, error = read(path)
    assert [record for _, record in records] == [{"a": 1}] * whole
    assert re.match(f"{path}{message}", error)


@pytest.mark.parametrize(
    "text, place, message",
    [
        ('{"a": 1}\nnot json\n{"a": 1}\n', ":2: ", "not JSON"),
        ('{"a": 1}\n[1]\n{"a": 1}\n', ":2: ", "expected a JSON object, got list"),
        ('{"a": 1}\n{"b": "\udcff"}\n{"a": 1}\n', ":2: ", "not UTF-8"),
        ('{"a": 1}\n{"b": {}\n{"a": 1}\n', ":2: ", "not JSON"),
        ('{"a": 1}\n' + '{"a": ' * 100_000 + '\n{"a": 1}\n', ":2: ", "JSON that Python cannot read"),
        ('[\n{"a": 1},\n5,\n{"a": 1}]', ": record 2: ", "expected a JSON object, got int"),
    ],
)
def test_a_bad_record_is_named_by_its_place(tmp_path, text, place, message):
    path = tmp_path / "records"
    path.write_bytes(text.encode(errors="surrogateescape"))
    records, error = read(path)
    assert len(records) == 1 and error.startswith(f"{path}{place}{message}")
