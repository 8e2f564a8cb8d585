"""Files of JSON: whole whenever a reader looks, and any text in a line."""

import json

import pytest
from refusals import refused

from g2po_trl import read_jsonl, write_jsonl
from g2po_trl.environments.tasks import read_tasks, tasks_hash
from g2po_trl.trajectory import Step, Trajectory, read_unfinished
from g2po_trl.utils.json import read_json_lines, write_json, write_json_lines

TEXT = "c\u2028d \u2029 e\x85f"  # separators that are no ends of lines
ROWS = [{"seed": 1, "goal": "a\nb [1,2]"}, {"seed": 2}, {"seed": 3, "goal": TEXT}]
FORMS = {
    "lines": "\n".join(map(json.dumps, ROWS)),
    "lines of a Windows editor": "\ufeff" + "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
    "an array over lines": json.dumps(ROWS, indent=1, ensure_ascii=False),
    "an array, an element a line": "\ufeff[" + ",\n".join(map(json.dumps, ROWS)) + "]\n",
}


def trajectory(name):
    return Trajectory(name, [Step(f"room ü {TEXT}", "go")], 1.0, "success")


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_read_in_any_form(form, tmp_path):
    path = tmp_path / "tasks.json"
    path.write_bytes(FORMS[form].encode())
    assert read_tasks(path) == ROWS


@pytest.mark.parametrize(
    ("text", "line"),
    [('[{"seed": 1},\n {"seed": 2}', 1), ('{"seed": 1}\n{\n"seed": \n}', 2), ('{"seed": 1}\n[1, 2]\n', 2)]
    + [("3", 1), ("[" * 100_000, 1)],
)
def test_what_is_no_row_is_named(text, line, tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(text)
    with refused("tasks") as error:
        read_tasks(path)
    assert f"line {line}," in str(error.value)


def test_a_hash_of_tasks_is_of_their_rows():
    assert tasks_hash([{"seed": 1, "a": 2}, {"seed": 2}]) == tasks_hash([{"seed": 2}, {"a": 2, "seed": 1}])
    others = [[{"seed": 1}], [{"seed": 1}, {"seed": 1}], [{"seed": "1"}], [{"seed": 1, "task_id": "a"}]]
    assert len({tasks_hash(rows) for rows in others}) == len(others)


@pytest.mark.parametrize("write", [write_json_lines, write_jsonl, lambda path, rows: write_json(path, list(rows))])
def test_who_looks_while_a_file_is_written_sees_the_old_one(tmp_path, write):
    path, seen = tmp_path / "made" / "rows.jsonl", []
    make = trajectory if write is write_jsonl else str

    def rows(end):
        for number in range(3):
            seen.append(path.read_bytes() if path.exists() else None)
            yield make(f"{end} {number}")
        if end == "broken":
            raise KeyboardInterrupt

    write(path, rows("first"))
    first = path.read_bytes()
    write(path, rows("second"))
    second = path.read_bytes()
    assert seen == [None] * 3 + [first] * 3 and second != first
    with pytest.raises(KeyboardInterrupt):
        write(path, rows("broken"))
    assert path.read_bytes() == second and [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_line_without_an_end_is_left_out_and_told(tmp_path):
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [trajectory("a"), trajectory("b")])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first + 1, len(whole) - 1, 7):  # between two bytes of a letter, too
        path.write_bytes(whole[:size])
        with pytest.warns(UserWarning, match=r"t.jsonl: the last line is incomplete"):
            assert [one.task_id for one in read_jsonl(path)] == ["a"]
        assert [one and one.task_id for one in read_unfinished(path)] == ["a", None]
        assert len(read_json_lines(path)) == 1
    path.write_bytes(whole[:-1])
    assert [one.task_id for one in read_jsonl(path)] == ["a", "b"], "only its end is missing"
