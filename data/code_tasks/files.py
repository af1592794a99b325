"""Files and paths. A path is a plain string, so that each function stands alone."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="count lines",
        asks="""
            count the {{what}} in a file
            find out how many {{what}} a file has
            How many {{what}} are in a file? Python, given its path.
        """,
        cases="""
            name               what                      test                     want
            count_comments     comment lines             line.startswith("#")     1
            count_empty_lines  empty lines               not line.strip()         1
            count_todo_lines   lines mentioning TODO     "TODO" in line           2
            count_long_lines   lines over 20 characters  len(line.rstrip()) > 20  1
        """,
        code='''
            def {{name}}(path: str) -> int:
                """Count the {{what}} in a file."""
                with open(path, encoding="utf-8") as file:
                    return sum(1 for line in file if {{test}})
        ''',
        tests=r"""
            (tmp / "a").write_text("# TODO\n\nimport re\nx = re.escape(y)  # TODO\n") and {{name}}(str(tmp / "a")) == {{want}}
        """,
    ),
    Task(
        name="list files",
        asks="""
            list the names of all {{what}} in a folder, sorted
            return the sorted {{what}} of a directory
            Which {{what}} are in a folder? I want the sorted names in Python.
        """,
        cases="""
            name        what          glob       want
            csv_files   CSV files     *.csv      ["a.csv"]
            log_files   log files     *.log      ["b.log"]
            dot_files   hidden files  .*         [".env"]
            test_files  test modules  test_*.py  ["test_c.py"]
            all_python  Python files  *.py       ["d.py", "test_c.py"]
        """,
        code='''
            def {{name}}(folder: str) -> list[str]:
                """List the {{what}} in a folder."""
                from pathlib import Path
                return sorted(path.name for path in Path(folder).glob("{{glob}}"))
        ''',
        tests="""
            [(tmp / n).touch() for n in ("a.csv", "b.log", ".env", "test_c.py", "d.py")] and {{name}}(str(tmp)) == {{want}}
        """,
    ),
    Task(
        name="read file",
        asks="""
            read {{what}} from a file
            load {{what}} out of a file, given the path
            There is a file with {{what}}. Load it in Python.
        """,
        cases=r"""
            name          what                  type            expr                                            text        want
            read_lines    all lines             list[str]       file.read().splitlines()                        "a\nb"      ["a", "b"]
            read_numbers  one integer per line  list[int]       [int(line) for line in file]                    "1\n22\n"   [1, 22]
            read_words    the set of words      set[str]        set(file.read().split())                        "a b a"     {"a", "b"}
            read_pairs    "key=value" lines     dict[str, str]  dict(line.strip().split("=") for line in file)  "a=1\nb=2"  {"a": "1", "b": "2"}
            read_title    the first line        str             file.readline().strip()                         "Hi\nyou"   "Hi"
        """,
        code='''
            def {{name}}(path: str) -> {{type}}:
                """Read {{what}} from a file."""
                with open(path, encoding="utf-8") as file:
                    return {{expr}}
        ''',
        tests='(tmp / "a").write_text({{text}}) and {{name}}(str(tmp / "a")) == {{want}}',
    ),
    Task(
        name="write file",
        asks="""
            write {{what}} to a file
            save {{what}} into a text file
            I have to store {{what}} in a file with Python.
        """,
        cases=r"""
            name           what                    arg      type            text                                             given       want
            write_lines    a list of lines         lines    list[str]       "\n".join(lines)                                 ["a", "b"]  a\nb
            write_numbers  integers, one per line  numbers  list[int]       "\n".join(map(str, numbers))                     [1, 2]      1\n2
            write_sorted   words in sorted order   words    list[str]       "\n".join(sorted(words))                         ["b", "a"]  a\nb
            write_pairs    a dict as "k=v" lines   pairs    dict[str, str]  "\n".join(f"{k}={v}" for k, v in pairs.items())  {"a": "1"}  a=1
        """,
        code='''
            def {{name}}(path: str, {{arg}}: {{type}}) -> None:
                """Write {{what}} to a file."""
                with open(path, "w", encoding="utf-8") as file:
                    file.write({{text}})
        ''',
        tests="""
            {{name}}(str(tmp / "a"), {{given}}) is None and (tmp / "a").read_text() == "{{want}}"
        """,
    ),
    Task(
        name="json file",
        asks="""
            load a JSON file and return {{what}}
            get {{what}} from a JSON file
            I keep data in a JSON file. Return {{what}}, in Python.
        """,
        cases="""
            name          what                   type       expr                      text              want
            json_keys     its sorted keys        list[str]  sorted(data)              {"b": 1, "a": 2}  ["a", "b"]
            json_name     its "name" entry       str        data["name"]              {"name": "x"}     "x"
            json_size     the number of entries  int        len(data)                 [1, 2, 3]         3
            json_total    the sum of its values  float      sum(data.values())        {"b": 1, "a": 2}  3
            json_version  its version, or "0"    str        data.get("version", "0")  {"a": 1}          "0"
        """,
        code='''
            def {{name}}(path: str) -> {{type}}:
                """Load a JSON file and return {{what}}."""
                import json
                with open(path, encoding="utf-8") as file:
                    data = json.load(file)
                return {{expr}}
        ''',
        tests="""(tmp / "a").write_text('{{text}}') and {{name}}(str(tmp / "a")) == {{want}}""",
    ),
    Task(
        name="path parts",
        asks="""
            return {{what}} of a path
            get {{what}} from a file path
            From "src/app/main.py" style paths I want {{what}}. Python.
        """,
        cases="""
            name            what                        expr                                     want
            file_name       the file name               PurePath(path).name                      "main.py"
            file_stem       the name without extension  PurePath(path).stem                      "main"
            file_extension  the extension               PurePath(path).suffix                    ".py"
            folder_name     the name of the folder      PurePath(path).parent.name               "app"
            backup_name     the name ending in ".bak"   PurePath(path).with_suffix(".bak").name  "main.bak"
        """,
        code='''
            def {{name}}(path: str) -> str:
                """Return {{what}} of a path."""
                from pathlib import PurePath
                return {{expr}}
        ''',
        example='{{name}}("src/app/main.py") == {{want}}',
    ),
    Task(
        name="csv column",
        asks="""
            {{do}} the "{{column}}" column of a CSV file
            open a CSV file and {{do}} its "{{column}}" column
            My CSV has a "{{column}}" column. Please {{do}} it in Python.
        """,
        cases="""
            name         do                   column  expr                       want
            sum_amounts  add up               amount  sum(values)                6
            mean_price   average              price   sum(values) / len(values)  3
            max_speed    take the maximum of  speed   max(values)                4
            min_depth    take the minimum of  depth   min(values)                2
            sum_hours    add up               hours   sum(values)                6
        """,
        code='''
            def {{name}}(path: str) -> float:
                """{{Do}} the {{column}} column of a CSV file."""
                import csv
                with open(path, encoding="utf-8") as file:
                    values = [float(row["{{column}}"]) for row in csv.DictReader(file)]
                return {{expr}}
        ''',
        tests=r"""
            (tmp / "a").write_text("id,{{column}}\n1,2\n2,4\n") and {{name}}(str(tmp / "a")) == {{want}}
        """,
    ),
    Task(
        name="part of file",
        asks="""
            return {{what}} of a text file
            show {{what}} in a file, given its path
            Only {{what}} of a file, please, as a Python list.
        """,
        cases="""
            name             what                    expr         want
            first_five       the first 5 lines       lines[:5]    ["0", "1", "2", "3", "4"]
            last_three_rows  the last 3 lines        lines[-3:]   ["6", "7", "8"]
            without_header   all but the first line  lines[1:]    ["1", "2", "3", "4", "5", "6", "7", "8"]
            even_lines       every second line       lines[1::2]  ["1", "3", "5", "7"]
        """,
        code='''
            def {{name}}(path: str) -> list[str]:
                """Return {{what}} of a file."""
                with open(path, encoding="utf-8") as file:
                    lines = file.read().splitlines()
                return {{expr}}
        ''',
        tests=r"""
            (tmp / "a").write_text("\n".join("012345678")) and {{name}}(str(tmp / "a")) == {{want}}
        """,
    ),
    Task(
        name="extreme file",
        asks="""
            return the name of the {{what}} file in a folder
            find the {{what}} file of a directory
        """,
        cases="""
            name          what     pick  field
            largest_file  largest  max   st_size
            oldest_file   oldest   min   st_mtime
        """,
        code='''
            def {{name}}(folder: str) -> str:
                """Return the name of the {{what}} file."""
                from pathlib import Path
                return {{pick}}(Path(folder).iterdir(), key=lambda path: path.stat().{{field}}).name
        ''',
        # The file b is the smaller one, and its time is set to the year 2255.
        tests="""
            [(tmp / "a").write_text("long"), (tmp / "b").write_text("x")] == [4, 1]
            __import__("os").utime(tmp / "b", (9e9, 9e9)) is None
            {{name}}(str(tmp)) == "a"
        """,
        held_out=True,
    ),
)
