"""Words, letters and other short texts."""

# ruff: noqa: E501 - a case is one row of a table
from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="pick words",
        asks="""
            list the words of a text that {{what}}
            pick out of a sentence the words that {{what}}
            Which words in a text {{what}}? Answer with a Python function.
        """,
        cases="""
            name               what                         test                   want
            long_words         have more than 4 letters     len(word) > 4          ["unhappy", "eating"]
            short_words        have fewer than 3 letters    len(word) < 3          ["An", "7"]
            four_letter_words  have exactly 4 letters       len(word) == 4         ["figs"]
            ing_words          end in "ing"                 word.endswith("ing")   ["eating"]
            un_words           start with "un"              word.startswith("un")  ["unhappy"]
            capital_words      start with a capital letter  word[0].isupper()      ["An", "Cat"]
        """,
        code='''
            def {{name}}(text: str) -> list[str]:
                """Return the words that {{what}}."""
                return [word for word in text.split() if {{test}}]
        ''',
        example='{{name}}("An unhappy Cat was eating 7 figs") == {{want}}',
    ),
    Task(
        name="count characters",
        asks="""
            count the {{what}} in a string
            find out how many {{what}} a string has
            How many {{what}} are in a given string? I want a Python function for that.
        """,
        cases="""
            name               what                test                     want
            count_vowels       vowels              char.lower() in "aeiou"  5
            count_digits       digits              char.isdigit()           2
            count_capitals     upper-case letters  char.isupper()           2
            count_spaces       spaces              char == " "              4
            count_punctuation  punctuation marks   char in ".,;:!?"         2
        """,
        code='''
            def {{name}}(text: str) -> int:
                """Count the {{what}} in the text."""
                return sum(1 for char in text if {{test}})
        ''',
        example='{{name}}("Eve met Al, at 10!") == {{want}}',
        tests='{{name}}("") == 0',
    ),
    Task(
        name="shorten",
        asks="""
            cut a text to {{n}} characters, ending it with "{{mark}}" when something was cut
            shorten a title to at most {{n}} characters with "{{mark}}" at the end
            truncate strings longer than {{n}} characters and add "{{mark}}"
        """,
        cases="""
            name           n   mark  keep
            shorten_to_20  20  ...   17
            shorten_to_40  40  ...   37
            clip_to_10     10  ~     9
            clip_to_60     60  ~     59
            teaser_of_80   80  [..]  76
        """,
        code='''
            def {{name}}(text: str) -> str:
                """Cut the text to {{n}} characters and mark the cut."""
                if len(text) <= {{n}}:
                    return text
                return text[:{{keep}}] + "{{mark}}"
        ''',
        tests="""
            {{name}}("x" * {{n}}) == "x" * {{n}}
            len({{name}}("x" * 200)) == {{n}}
            {{name}}("x" * 200).endswith("x{{mark}}")
        """,
    ),
    Task(
        name="mask",
        asks="""
            hide all but the last {{n}} characters of a {{thing}} behind "{{mark}}"
            mask a {{thing}} with "{{mark}}" so that only its last {{n}} characters stay readable
            replace everything except the last {{n}} characters of a {{thing}} with "{{mark}}"
        """,
        cases="""
            name         thing          arg      n  mark
            mask_card    card number    card     4  *
            mask_phone   phone number   phone    3  x
            mask_token   session token  token    6  #
            mask_iban    bank account   account  2  *
            mask_serial  serial number  serial   5  -
        """,
        code='''
            def {{name}}({{arg}}: str) -> str:
                """Mask all but the last {{n}} characters of the {{thing}}."""
                hidden = max(len({{arg}}) - {{n}}, 0)
                return "{{mark}}" * hidden + {{arg}}[hidden:]
        ''',
        tests="""
            {{name}}("123456789") == "{{mark}}" * (9 - {{n}}) + "123456789"[-{{n}}:]
            {{name}}("1") == "1"
        """,
    ),
    Task(
        name="naming style",
        asks="""
            turn {{old}} into {{new}}
            convert a name from {{old}} to {{new}}
            rewrite {{old}} as {{new}}
        """,
        cases="""
            name             old            new           sep  body                               want
            kebab_to_snake   kebab-case     snake_case    -    "_".join(parts)                    "max_row_id"
            snake_to_kebab   snake_case     kebab-case    _    "-".join(parts)                    "max-row-id"
            dots_to_path     a dotted name  a slash path  .    "/".join(parts)                    "max/row/id"
            snake_to_pascal  snake_case     PascalCase    _    "".join(p.title() for p in parts)  "MaxRowId"
            kebab_to_words   kebab-case     plain words   -    " ".join(parts)                    "max row id"
        """,
        code='''
            def {{name}}(name: str) -> str:
                """Convert {{old}} to {{new}}."""
                parts = name.split("{{sep}}")
                return {{body}}
        ''',
        example='{{name}}("max{{sep}}row{{sep}}id") == {{want}}',
    ),
    Task(
        name="palindrome",
        asks="""
            check whether {{what}}
            tell if {{what}}
            I'd like a Python function that says whether {{what}}.
        """,
        cases="""
            name                  what                                       clean                                      yes           no
            is_palindrome         a word reads the same backwards            text                                       "noon"        "moon"
            is_loose_palindrome   a word is a palindrome, ignoring case      text.lower()                               "Anna"        "Hanna"
            is_phrase_palindrome  a phrase is a palindrome, ignoring spaces  text.replace(" ", "")                      "nurses run"  "nurse runs"
            is_letter_palindrome  the letters of a text form a palindrome    [char for char in text if char.isalpha()]  "no, on"      "no, no"
        """,
        code='''
            def {{name}}(text: str) -> bool:
                """Check whether {{what}}."""
                clean = {{clean}}
                return clean == clean[::-1]
        ''',
        tests="""
            {{name}}({{yes}}) is True
            {{name}}({{no}}) is False
        """,
    ),
    Task(
        name="drop characters",
        asks="""
            remove all {{what}} from a string
            strip the {{what}} out of a text
            return a string without its {{what}}
        """,
        cases="""
            name              what                test                         want
            drop_digits       digits              not char.isdigit()           "Hey, Jo!"
            drop_vowels       vowels              char.lower() not in "aeiou"  "Hy, J22!"
            drop_punctuation  punctuation marks   char not in ".,;:!?"         "Hey Jo22"
            drop_spaces       spaces              not char.isspace()           "Hey,Jo22!"
            drop_capitals     upper-case letters  not char.isupper()           "ey, o22!"
        """,
        code='''
            def {{name}}(text: str) -> str:
                """Remove the {{what}} from the text."""
                return "".join(char for char in text if {{test}})
        ''',
        example='{{name}}("Hey, Jo22!") == {{want}}',
    ),
    Task(
        name="prefix lines",
        asks="""
            put "{{mark}}" in front of every line of a text
            start each line of a text with "{{mark}}"
            Every line of my text should begin with "{{mark}}". Python function?
        """,
        cases=r"""
            name           mark  doc
            quote_lines    >     Quote every line of the text.
            comment_lines  #     Comment out every line of the text.
            bullet_lines   -     Turn every line into a bullet point.
            slash_lines    //    Prefix every line with two slashes.
            pipe_lines     |     Prefix every line with a bar.
        """,
        code=r'''
            def {{name}}(text: str) -> str:
                """{{doc}}"""
                return "\n".join(f"{{mark}} {line}" for line in text.splitlines())
        ''',
        tests=r'{{name}}("one\ntwo") == "{{mark}} one\n{{mark}} two"',
    ),
    Task(
        name="most common",
        asks="""
            find {{what}}
            work out {{what}}
            Python function that returns {{what}}, please
        """,
        cases=r"""
            name                 what                                source                              arg                     want
            most_common_word     the most frequent word of a text    text.lower().split()                "To be or to go"        "to"
            most_common_letter   the most frequent letter of a text  [c for c in text if c.isalpha()]    "odd 0000"              "d"
            most_common_digit    the most frequent digit of a text   [c for c in text if c.isdigit()]    "a7 b7 c1 ccc"          "7"
            most_common_initial  the letter most words start with    [word[0] for word in text.split()]  "top oboe of all oxen"  "o"
            most_common_line     the line that occurs most often     text.splitlines()                   "x\ny\nx"               "x"
        """,
        code='''
            def {{name}}(text: str) -> str:
                """Return {{what}}."""
                from collections import Counter
                return Counter({{source}}).most_common(1)[0][0]
        ''',
        example="{{name}}({{arg}}) == {{want}}",
    ),
    Task(
        name="swap ends",
        asks="""
            swap the first and last {{what}} of a {{thing}}
            exchange the first {{what}} of a {{thing}} with its last one
        """,
        cases="""
            name              what       thing     split            join             want
            swap_end_words    word       sentence  text.split()     " ".join(items)  "c de ab"
            swap_end_letters  character  word      list(text)       "".join(items)   "cb de a"
            swap_end_fields   field      CSV line  text.split(",")  ",".join(items)  "ab de c"
            swap_end_parts    part       slug      text.split("-")  "-".join(items)  "ab de c"
        """,
        code='''
            def {{name}}(text: str) -> str:
                """Swap the first and last {{what}}."""
                items = {{split}}
                items[0], items[-1] = items[-1], items[0]
                return {{join}}
        ''',
        tests='{{name}}("ab de c") == {{want}}',
        held_out=True,
    ),
    Task(
        name="caesar",
        asks="""
            shift every letter of a lower-case word by {{n}} places in the alphabet
            encode a lower-case word with a Caesar cipher of {{n}}
        """,
        cases="""
            name       n   want
            caesar_3   3   "dcb"
            rotate_13  13  "nml"
        """,
        code='''
            def {{name}}(word: str) -> str:
                """Shift each letter by {{n}} places."""
                return "".join(chr((ord(char) - 97 + {{n}}) % 26 + 97) for char in word)
        ''',
        example='{{name}}("azy") == {{want}}',
        held_out=True,
    ),
)
