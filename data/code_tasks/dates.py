"""Dates and times. A date is an ISO string, so that each function stands alone."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="shift date",
        asks="""
            return the date {{what}} a given ISO date
            find which day is {{what}} a date like "2024-02-27"
            Which date is {{what}} an ISO date? Python.
        """,
        cases="""
            name            what            sign  unit   n   want
            in_three_days   3 days after    +     days   3   "2024-03-01"
            in_a_fortnight  2 weeks after   +     weeks  2   "2024-03-12"
            ten_days_ago    10 days before  -     days   10  "2024-02-17"
            a_week_before   1 week before   -     weeks  1   "2024-02-20"
            in_ninety_days  90 days after   +     days   90  "2024-05-27"
        """,
        code='''
            def {{name}}(day: str) -> str:
                """Return the date {{what}} the given day."""
                from datetime import date, timedelta
                return str(date.fromisoformat(day) {{sign}} timedelta({{unit}}={{n}}))
        ''',
        example='{{name}}("2024-02-27") == {{want}}',
    ),
    Task(
        name="weekday",
        asks="""
            check whether an ISO date is a {{what}}
            tell if a date string falls on a {{what}}
            Is "2024-06-07" style text a {{what}}? Python check.
        """,
        cases="""
            name        what         test  yes         no
            is_monday   Monday       == 0  2024-06-03  2024-06-04
            is_friday   Friday       == 4  2024-06-07  2024-06-08
            is_weekend  weekend day  >= 5  2024-06-08  2024-06-10
            is_workday  working day  < 5   2024-06-07  2024-06-09
        """,
        code='''
            def {{name}}(day: str) -> bool:
                """Check whether the date is a {{what}}."""
                from datetime import date
                return date.fromisoformat(day).weekday() {{test}}
        ''',
        tests="""
            {{name}}("{{yes}}") is True
            {{name}}("{{no}}") is False
        """,
    ),
    Task(
        name="difference",
        asks="""
            count the {{what}} between two {{things}}
            compute how many {{what}} lie between two {{things}}
            How many {{what}} are there between two {{things}}? Python function.
        """,
        cases="""
            name           what        things      cls       expr                        a                 b                 want  type
            days_between   days        ISO dates   date      gap.days                    2024-02-27        2024-03-01        3     int
            weeks_between  full weeks  ISO dates   date      gap.days // 7               2024-01-01        2024-01-20        2     int
            hours_between  hours       timestamps  datetime  gap.total_seconds() / 3600  2024-01-01T06:00  2024-01-02T07:30  25.5  float
            minutes_apart  minutes     timestamps  datetime  gap.total_seconds() / 60    2024-01-01T06:00  2024-01-01T07:30  90    float
        """,
        code='''
            def {{name}}(start: str, end: str) -> {{type}}:
                """Count the {{what}} from start to end."""
                from datetime import {{cls}}
                gap = {{cls}}.fromisoformat(end) - {{cls}}.fromisoformat(start)
                return {{expr}}
        ''',
        tests='{{name}}("{{a}}", "{{b}}") == {{want}}',
    ),
    Task(
        name="show date",
        asks="""
            format an ISO date like "{{sample}}"
            turn "2024-03-09" into "{{sample}}"
            write a date string in the style "{{sample}}"
        """,
        cases="""
            name            doc                                    spec      sample
            german_date     Write an ISO date with dots.           %d.%m.%Y  09.03.2024
            us_date         Write an ISO date month first.         %m/%d/%Y  03/09/2024
            month_and_year  Write the month and year of a date.    %B %Y     March 2024
            short_date      Write an ISO date with a short month.  %d %b     09 Mar
            compact_date    Write an ISO date as eight digits.     %Y%m%d    20240309
        """,
        code='''
            def {{name}}(day: str) -> str:
                """{{doc}}"""
                from datetime import date
                return date.fromisoformat(day).strftime("{{spec}}")
        ''',
        tests='{{name}}("2024-03-09") == "{{sample}}"',
    ),
    Task(
        name="read date",
        asks="""
            convert a date like "{{sample}}" to ISO format
            parse "{{sample}}" style dates into ISO strings
            My dates look like "{{sample}}". I need "2024-12-31" instead.
        """,
        cases="""
            name              doc                                    spec      sample
            iso_from_dots     Convert a dotted date to ISO.          %d.%m.%Y  31.12.2024
            iso_from_slashes  Convert a month-first date to ISO.     %m/%d/%Y  12/31/2024
            iso_from_compact  Convert an eight-digit date to ISO.    %Y%m%d    20241231
            iso_from_words    Convert a written date to ISO.         %d %B %Y  31 December 2024
            iso_from_short    Convert a two-digit year date to ISO.  %d-%m-%y  31-12-24
        """,
        code='''
            def {{name}}(text: str) -> str:
                """{{doc}}"""
                from datetime import datetime
                return datetime.strptime(text, "{{spec}}").date().isoformat()
        ''',
        example='{{name}}("{{sample}}") == "2024-12-31"',
    ),
    Task(
        name="date parts",
        asks="""
            get the {{what}} of an ISO date
            extract the {{what}} from a date string
            I need the {{what}} of a date such as "2024-08-15".
        """,
        cases="""
            name         what             expr                                         want
            quarter_of   quarter          (date.fromisoformat(day).month + 2) // 3     3
            week_of      ISO week number  date.fromisoformat(day).isocalendar()[1]     33
            day_of_year  day of the year  date.fromisoformat(day).timetuple().tm_yday  228
            month_of     month number     date.fromisoformat(day).month                8
        """,
        code='''
            def {{name}}(day: str) -> int:
                """Return the {{what}} of the date."""
                from datetime import date
                return {{expr}}
        ''',
        example='{{name}}("2024-08-15") == {{want}}',
    ),
    Task(
        name="show duration",
        asks="""
            format {{what}} as "{{style}}"
            turn a number of {{what}} into "{{style}}" text
            Show {{what}} in the form "{{style}}", Python.
        """,
        cases="""
            name           what     n    style   parts             size  shape
            seconds_clock  seconds  605  10:05   minutes, seconds  60    {minutes}:{seconds:02d}
            minutes_clock  minutes  605  10:05   hours, minutes    60    {hours}:{minutes:02d}
            minutes_words  minutes  75   1h 15m  hours, minutes    60    {hours}h {minutes}m
            hours_words    hours    50   2d 2h   days, hours       24    {days}d {hours}h
            days_words     days     17   2w 3d   weeks, days       7     {weeks}w {days}d
        """,
        code='''
            def {{name}}(total: int) -> str:
                """Format {{what}} like {{style}}."""
                {{parts}} = divmod(total, {{size}})
                return f"{{shape}}"
        ''',
        example='{{name}}({{n}}) == "{{style}}"',
    ),
    Task(
        name="month edge",
        asks="""
            return the {{what}} of the month of an ISO date
            find the {{what}} of the month that a date is in
        """,
        cases="""
            name             what                  expr                                 want
            days_in_month    length                calendar.monthrange(year, month)[1]  29
            month_starts_on  first weekday number  calendar.monthrange(year, month)[0]  3
        """,
        code='''
            def {{name}}(day: str) -> int:
                """Return the {{what}} of the month."""
                import calendar
                year, month, _ = map(int, day.split("-"))
                return {{expr}}
        ''',
        example='{{name}}("2024-02-10") == {{want}}',
        held_out=True,
    ),
)
