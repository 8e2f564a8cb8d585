"""A few additional tasks for AppWorld, made where AppWorld is installed: `VENV/bin/python tiny_tasks.py`.

Writes $APPWORLD_ROOT/data: one person, three notes in one app, questions about them; datasets "train" and "dev". The
output contains the apps' schemas and documentation, which must not be published in plain text under their licence, so
it is made on the machine that needs it and never committed. The program runs in AppWorld's environment, so it imports
nothing from g2po-trl.
"""

import json
import os
import shutil
from pathlib import Path

from appworld.apps import get_all_apps
from appworld.collections.api_docs import ApiDocCollection
from appworld.collections.models import ModelCollection
from appworld.common.constants import DB_VERSION

DATA = Path(os.environ["APPWORLD_ROOT"], "data")
PERSON = {
    "first_name": "Ines",
    "last_name": "Halloran",
    "email": "ines.halloran@example.com",
    "phone_number": "5550142873",
}
PASSWORD = "blue-lamp-7"
BIRTH = {"birthday": "1988-03-14", "sex": "female"}
NOTES = {"Groceries": "milk\neggs\nrice", "Gift ideas": "scarf", "Books": "Dune\nEmma"}
QUESTIONS = {
    "train": [
        ("How many lines has my note 'Groceries' in Simple Note?", 3),
        ("What does my note 'Gift ideas' in Simple Note say?", "scarf"),
    ],
    "dev": [
        ("How many lines has my note 'Books' in Simple Note?", 2),
        ("How many notes have I in Simple Note?", 3),
    ],
}
EVALUATION = '''from appworld.evaluator import *


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    given = models.end.supervisor.Task.all()[0]._to_humanized_dict()["answer"]
    with test(
        """
        assert answers match.
        """
    ):
        test.answer(given, ground_truth_answer)
'''


def write(path: Path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def make_databases(docs) -> int:
    """Create the initial state of all tasks and return the person's id."""
    home = DATA / "base_dbs"
    home.mkdir(parents=True)
    models = ModelCollection.load(
        to_db_home_path=str(home),
        force_empty_apps=get_all_apps(),
        load_apps=[],
        create_db=True,
        skip_mandatory_apps=True,
    )
    models.admin.MainUser(**PERSON, **BIRTH).save()
    person = models.supervisor.Supervisor(**PERSON, **BIRTH)
    person.save()
    models.supervisor.AccountPassword(supervisor_id=person.id, account_name="simple_note", password=PASSWORD).save()
    names = {name: PERSON[name] for name in ("first_name", "last_name", "email")}
    user = models.simple_note.User(**names, password=PASSWORD, verified=True)
    user.save()
    for title, content in NOTES.items():
        models.simple_note.Note(user_id=user.id, title=title, content=content, tags=[]).save()
    for app, functions in docs.items():
        for name, doc in functions.items() if app != "admin" else ():
            fields = {
                field: doc[field] for field in ("path", "method", "description", "parameters", "response_schemas")
            }
            models.api_docs.ApiDoc(app_name_=app, api_name=name, **fields).save()
    return person.id


def make_task(task_id: str, question: str, answer, person: int) -> None:
    folder = DATA / "tasks" / task_id
    specification = {"instruction": question, "supervisor": PERSON, "datetime": "2023-05-18T12:00:00"}
    write(folder / "specs.json", {**specification, "db_version": DB_VERSION, "canary_string": ""})
    for app in get_all_apps():  # changes against the databases all start from: none but the task itself
        write(folder / "dbs" / f"{app}.jsonl", "")
    insert = "INSERT INTO tasks (supervisor_id, instruction, status, answer) VALUES (?, ?, ?, ?)"
    row = [insert, [person, question, None, json.dumps("<<NOT_GIVEN>>")], False]
    write(folder / "dbs" / "supervisor.jsonl", json.dumps(row) + "\n")
    truth = folder / "ground_truth"
    effort = {"num_apps": 1, "num_apis": 3, "num_api_calls": 3, "num_solution_code_lines": 6}
    write(truth / "metadata.json", {"difficulty": 1, "mode": "minimal", **effort})
    write(truth / "public_data.json", {})
    write(truth / "private_data.json", {})
    write(truth / "answer.json", json.dumps(answer))
    write(truth / "test_data.json", [{"requirement": "assert answers match.", "label": "no_op_fail"}])
    write(truth / "evaluation.py", EVALUATION)


def main() -> None:
    shutil.rmtree(DATA, ignore_errors=True)
    docs = ApiDocCollection.build()
    for app, functions in docs.items():
        described = {name: dict(doc, canary_string="") for name, doc in functions.items()}
        write(DATA / "api_docs" / "standard" / f"{app}.json", described)
    person = make_databases(docs)
    for number, (dataset, questions) in enumerate(QUESTIONS.items()):
        ids = [f"tiny{number:03d}_{i}" for i in range(1, len(questions) + 1)]
        for task_id, (question, answer) in zip(ids, questions):
            make_task(task_id, question, answer, person)
        write(DATA / "datasets" / f"{dataset}.txt", "".join(f"{task_id}\n" for task_id in ids))
    print(f"{sum(map(len, QUESTIONS.values()))} tasks in {DATA}")


if __name__ == "__main__":
    main()
