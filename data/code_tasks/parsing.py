"""Reading structure out of text: pairs, fields, numbers, log lines."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="pairs",
        asks="""
            parse a {{thing}} such as "{{sample}}" into a dict
            turn "{{sample}}" style text into a dictionary of strings
            I get a {{thing}} like "{{sample}}" and need a dict from it.
        """,
        cases="""
            name            thing          sep  mid  sample
            parse_query     query string   &    =    a=1&b=2
            parse_settings  settings line  ;    =    a=1;b=2
            parse_labels    label list     ,    :    a:1,b:2
            parse_styles    style string   ;    :    a:1;b:2
            parse_tags      tag line       |    @    a@1|b@2
        """,
        code='''
            def {{name}}(text: str) -> dict[str, str]:
                """Parse the {{thing}} into a dict."""
                return dict(pair.split("{{mid}}", 1) for pair in text.split("{{sep}}"))
        ''',
        example='{{name}}("{{sample}}") == {"a": "1", "b": "2"}',
    ),
    Task(
        name="find all",
        asks="""
            extract all {{what}} from a text
            collect the {{what}} that occur in a string
            There are {{what}} somewhere in my text. Find them all with Python.
        """,
        cases=r"""
            name           what              pattern        want
            find_hashtags  hashtags          #\w+           ["#tea"]
            find_mentions  @mentions         @\w+           ["@ana"]
            find_years     four-digit years  \b\d{4}\b      ["2021"]
            find_prices    dollar prices     \$\d+\.\d{2}   ["$4.50"]
            find_acronyms  acronyms          \b[A-Z]{2,}\b  ["UK"]
        """,
        code='''
            def {{name}}(text: str) -> list[str]:
                """Find all {{what}} in the text."""
                import re
                return re.findall(r"{{pattern}}", text)
        ''',
        tests="""{{name}}("@ana said 'ok' to #tea in UK, 2021: $4.50") == {{want}}""",
    ),
    Task(
        name="split fields",
        asks="""
            split a line at every {{what}} and trim the parts
            break a string into trimmed parts at each {{what}}, skipping empty ones
            get the non-empty fields of a {{what}} separated line
        """,
        cases=r"""
            name              what       sep
            comma_fields      comma      ,
            semicolon_fields  semicolon  ;
            pipe_fields       pipe       |
            tab_fields        tab        \t
            colon_fields      colon      :
        """,
        code='''
            def {{name}}(line: str) -> list[str]:
                """Return the trimmed parts between each {{what}}."""
                parts = [part.strip() for part in line.split("{{sep}}")]
                return [part for part in parts if part]
        ''',
        example='{{name}}("a {{sep}}b{{sep}} {{sep}}c") == ["a", "b", "c"]',
    ),
    Task(
        name="read quantity",
        asks="""
            read {{what}} such as "{{sample}}" as a number
            convert {{what}} like "{{sample}}" to {{article}} {{type}}
            My input is {{what}}, e.g. "{{sample}}". Give me the number in Python.
        """,
        cases="""
            name          what              sample  article  type   body                                 want
            parse_price   a price           $3.50   a        float  float(text.removeprefix("$"))        3.5
            parse_weight  a weight          12.5kg  a        float  float(text.removesuffix("kg"))       12.5
            parse_pixels  a pixel size      30px    an       int    int(text.removesuffix("px"))         30
            parse_share   a percentage      45%     a        float  float(text.removesuffix("%")) / 100  0.45
            parse_amount  a grouped number  1,204   an       int    int(text.replace(",", ""))           1204
        """,
        code='''
            def {{name}}(text: str) -> {{type}}:
                """Read {{what}} as {{article}} {{type}}."""
                return {{body}}
        ''',
        example='{{name}}("{{sample}}") == {{want}}',
    ),
    Task(
        name="show quantity",
        asks="""
            format {{what}} with {{n}} decimals, like "{{sample}}"
            write {{what}} as text such as "{{sample}}"
            show {{what}} the way "{{sample}}" looks
        """,
        cases="""
            name           what        arg     n  shape             value  sample
            show_price     a price     price   2  ${price:.2f}      4.5    $4.50
            show_weight    a weight    weight  1  {weight:.1f} kg   2.26   2.3 kg
            show_share     a fraction  share   0  {share:.0%}       0.36   36%
            show_speed     a speed     speed   1  {speed:.1f} km/h  88.04  88.0 km/h
            show_distance  a distance  metres  3  {metres:.3f} m    1.5    1.500 m
        """,
        code='''
            def {{name}}({{arg}}: float) -> str:
                """Format {{what}} with {{n}} decimals."""
                return f"{{shape}}"
        ''',
        example='{{name}}({{value}}) == "{{sample}}"',
    ),
    Task(
        name="column",
        asks="""
            return the {{nth}} column of {{what}} text
            take the {{nth}} field of each line in {{what}} text
            From {{what}} text I only want the {{nth}} column, as a Python list.
        """,
        cases=r"""
            name                nth     what             sep               index  line     want
            first_csv_column    first   comma separated  line.split(",")   0      a,b,c    a
            second_csv_column   second  comma separated  line.split(",")   1      a,b,c    b
            last_tab_column     last    tab separated    line.split("\t")  -1     a\tb\tc  c
            third_word_column   third   space separated  line.split()      2      a b c d  c
            second_pipe_column  second  pipe separated   line.split("|")   1      a|b|c    b
        """,
        code='''
            def {{name}}(text: str) -> list[str]:
                """Return the {{nth}} field of each line."""
                return [{{sep}}[{{index}}] for line in text.splitlines()]
        ''',
        tests=r'{{name}}("{{line}}\n{{line}}") == ["{{want}}", "{{want}}"]',
    ),
    Task(
        name="between",
        asks="""
            return the text between the first pair of {{what}}
            get what stands inside the first {{what}} of a string
            cut out the part of a string that is enclosed in {{what}}
        """,
        cases="""
            name             what             open  close
            inside_parens    parentheses      (     )
            inside_brackets  square brackets  [     ]
            inside_angles    angle brackets   <     >
            inside_stars     asterisks        *     *
            inside_bars      vertical bars    |     |
        """,
        code='''
            def {{name}}(text: str) -> str:
                """Return the text inside the first {{what}}."""
                start = text.index("{{open}}") + 1
                return text[start : text.index("{{close}}", start)]
        ''',
        example='{{name}}("go {{open}}left{{close}} now") == "left"',
    ),
    Task(
        name="log lines",
        asks="""
            count the log lines that {{what}}
            find how many lines of a log {{what}}
            How many lines in a log {{what}}? Python function.
        """,
        cases="""
            name               what                test                        want
            count_errors       start with ERROR    line.startswith("ERROR")    2
            count_warnings     start with WARNING  line.startswith("WARNING")  1
            count_timeouts     mention a timeout   "timeout" in line.lower()   2
            count_blank_lines  are blank           not line.strip()            1
            count_finished     end with "done"     line.endswith("done")       1
        """,
        code='''
            def {{name}}(log: str) -> int:
                """Count the lines that {{what}}."""
                return sum(1 for line in log.splitlines() if {{test}})
        ''',
        tests=r'{{name}}("ERROR Timeout\nWARNING timeout\n\nERROR disk\nsync done") == {{want}}',
    ),
    Task(
        name="sentence",
        asks="""
            {{do}} in a sentence
            take a sentence and {{do}}
            Given a sentence, {{do}}. Python function please.
        """,
        cases="""
            name              do                              type   body                                want
            initials          join the initials of all words  str    "".join(word[0] for word in words)  "bbw"
            longest_word      find the longest word           str    max(words, key=len)                 "brown"
            reverse_words     reverse the order of the words  str    " ".join(words[::-1])               "wolf brown big"
            mean_word_length  average the word lengths        float  sum(map(len, words)) / len(words)   4.0
            count_distinct    count the distinct words        int    len(set(words))                     3
        """,
        code='''
            def {{name}}(sentence: str) -> {{type}}:
                """{{Do}}."""
                words = sentence.split()
                return {{body}}
        ''',
        example='{{name}}("big brown wolf") == {{want}}',
    ),
    Task(
        name="clock",
        asks="""
            convert a clock time like "07:45" to {{what}}
            turn "HH:MM" into {{what}}
        """,
        cases="""
            name              what                       type   body                            want
            clock_to_minutes  minutes since midnight     int    int(hours) * 60 + int(minutes)  465
            clock_to_hours    hours as a decimal number  float  int(hours) + int(minutes) / 60  7.75
        """,
        code='''
            def {{name}}(clock: str) -> {{type}}:
                """Convert a clock time to {{what}}."""
                hours, minutes = clock.split(":")
                return {{body}}
        ''',
        example='{{name}}("07:45") == {{want}}',
        held_out=True,
    ),
)
