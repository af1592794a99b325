"""Arithmetic: units, predicates, rounding, digits, shapes, money, statistics."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="units",
        asks="""
            convert {{old}} to {{new}}
            turn a value in {{old}} into {{new}}
            How many {{new}} is a value in {{old}}? Python function please.
        """,
        cases="""
            name                   old         arg      new          expr                  given     want
            celsius_to_fahrenheit  Celsius     celsius  Fahrenheit   celsius * 9 / 5 + 32  100       212
            kelvin_to_celsius      Kelvin      kelvin   Celsius      kelvin - 273.15       273.15    0
            km_to_miles            kilometres  km       miles        km / 1.609344         1.609344  1
            pounds_to_kg           pounds      pounds   kilograms    pounds * 0.45359237   2         0.90718474
            inches_to_cm           inches      inches   centimetres  inches * 2.54         10        25.4
        """,
        code='''
            def {{name}}({{arg}}: float) -> float:
                """Convert {{old}} to {{new}}."""
                return {{expr}}
        ''',
        example="{{name}}({{given}}) == {{want}}",
    ),
    Task(
        name="number tests",
        asks="""
            check if a number is {{what}}
            test whether an integer is {{what}}
            Is a given integer {{what}}? I need that as a Python function.
        """,
        cases="""
            name              what               test                                                          yes   no
            is_multiple_of_7  a multiple of 7    number % 7 == 0                                               21    22
            is_power_of_two   a power of two     number > 0 and number & (number - 1) == 0                     64    96
            is_square         a perfect square   number >= 0 and round(number**0.5) ** 2 == number             49    50
            is_leap_year      a leap year        number % 4 == 0 and (number % 100 != 0 or number % 400 == 0)  2024  1900
            is_two_digit      between 10 and 99  10 <= number <= 99                                            10    100
        """,
        code='''
            def {{name}}(number: int) -> bool:
                """Check whether the number is {{what}}."""
                return {{test}}
        ''',
        tests="""
            {{name}}({{yes}}) is True
            {{name}}({{no}}) is False
        """,
    ),
    Task(
        name="clamp",
        asks="""
            limit a {{thing}} to the range {{low}} to {{high}}
            clamp a {{thing}} so that it stays between {{low}} and {{high}}
            A {{thing}} must never leave {{low}}..{{high}}. Python function to force that.
        """,
        cases="""
            name          thing       type   low    high
            clamp_volume  volume      int    0      11
            clamp_share   share       float  0.0    1.0
            clamp_byte    byte value  int    0      255
            clamp_score   score       int    1      5
            clamp_angle   tilt angle  float  -45.0  45.0
        """,
        code='''
            def {{name}}(value: {{type}}) -> {{type}}:
                """Clamp a {{thing}} between {{low}} and {{high}}."""
                return max({{low}}, min({{high}}, value))
        ''',
        tests="""
            {{name}}({{low}} - 1) == {{low}}
            {{name}}({{high}} + 1) == {{high}}
            {{name}}(({{low}} + {{high}}) // 2) == ({{low}} + {{high}}) // 2
        """,
    ),
    Task(
        name="round to",
        asks="""
            round a {{thing}} {{how}} multiple of {{n}}
            bring a {{thing}} {{how}} multiple of {{n}}
        """,
        cases="""
            name               thing   how               n     expr                        given  want
            round_to_5         number  to the nearest    5     round(value / 5) * 5        13     15
            round_to_quarter   price   to the nearest    0.25  round(value / 0.25) * 0.25  1.3    1.25
            round_up_to_10     number  up to the next    10    -(-value // 10) * 10        41     50
            round_down_to_100  number  down to the last  100   value // 100 * 100          799    700
            round_up_to_8      size    up to the next    8     -(-value // 8) * 8          17     24
        """,
        code='''
            def {{name}}(value: float) -> float:
                """Round the value {{how}} multiple of {{n}}."""
                return {{expr}}
        ''',
        example="{{name}}({{given}}) == {{want}}",
        tests="{{name}}({{n}} * 3) == {{n}} * 3",
    ),
    Task(
        name="digits",
        asks="""
            {{do}} the digits of a positive integer
            take a positive integer and {{do}} its digits
            Python: {{do}} the decimal digits of n
        """,
        cases="""
            name             do                   body                                      want
            add_digits       add up               sum(int(digit) for digit in str(number))  8
            count_digits_of  count                len(str(number))                          3
            reverse_digits   reverse              int(str(number)[::-1])                    35
            sort_digits      sort                 int("".join(sorted(str(number))))         35
            max_digit        find the largest of  max(int(digit) for digit in str(number))  5
        """,
        code='''
            def {{name}}(number: int) -> int:
                """{{Do}} the digits of the number."""
                return {{body}}
        ''',
        example="{{name}}(530) == {{want}}",
    ),
    Task(
        name="shapes",
        asks="""
            compute {{what}}
            calculate {{what}} in a function
            What is {{what}}? Show me Python.
        """,
        cases="""
            name              what                          args                          expr                           given    want
            rectangle_area    the area of a rectangle       width: float, height: float   width * height                 3, 4     12
            rectangle_border  the perimeter of a rectangle  width: float, height: float   2 * (width + height)           3, 4     14
            triangle_area     the area of a triangle        base: float, height: float    base * height / 2              3, 4     6
            diagonal          the diagonal of a rectangle   width: float, height: float   (width**2 + height**2) ** 0.5  3, 4     5
            box_volume        the volume of a box           a: float, b: float, c: float  a * b * c                      2, 3, 4  24
        """,
        code='''
            def {{name}}({{args}}) -> float:
                """Compute {{what}}."""
                return {{expr}}
        ''',
        example="{{name}}({{given}}) == {{want}}",
    ),
    Task(
        name="money",
        asks="""
            {{do}} a price
            {{do}} an amount of money, rounded to cents
            Please {{do}} a price and round to cents. Python.
        """,
        cases="""
            name         do                       factor  want
            add_vat      add 19 percent tax to    1.19    59.5
            discount_20  take 20 percent off      0.8     40.0
            add_tip      add a 15 percent tip to  1.15    57.5
            half_price   take 50 percent off      0.5     25.0
        """,
        code='''
            def {{name}}(price: float) -> float:
                """{{Do}} the price."""
                return round(price * {{factor}}, 2)
        ''',
        example="{{name}}(50.0) == {{want}}",
    ),
    Task(
        name="statistics",
        asks="""
            compute the {{what}} of a list of numbers
            find the {{what}} of some measurements
            I'd like the {{what}} of a list in Python.
        """,
        cases="""
            name          what                    body                                                 want
            mean          arithmetic mean         sum(numbers) / len(numbers)                          3
            spread        range                   max(numbers) - min(numbers)                          8
            max_abs       largest absolute value  max(abs(x) for x in numbers)                         7
            root_mean_sq  root mean square        (sum(x * x for x in numbers) / len(numbers)) ** 0.5  5
            mid_range     mid-range               (min(numbers) + max(numbers)) / 2                    3
        """,
        code='''
            def {{name}}(numbers: list[float]) -> float:
                """Return the {{what}} of the numbers."""
                return {{body}}
        ''',
        example="{{name}}([-1, 7]) == {{want}}",
    ),
    Task(
        name="series",
        asks="""
            sum {{what}} from 1 to n
            add up {{what}} from 1 up to and including n
            What do {{what}} from 1 to n add up to? Python function.
        """,
        cases="""
            name         what              term   source              want
            sum_squares  the squares       k * k  range(1, n + 1)     91
            sum_cubes    the cubes         k**3   range(1, n + 1)     441
            sum_odds     the odd numbers   k      range(1, n + 1, 2)  9
            sum_evens    the even numbers  k      range(2, n + 1, 2)  12
        """,
        code='''
            def {{name}}(n: int) -> int:
                """Sum {{what}} from 1 to n."""
                return sum({{term}} for k in {{source}})
        ''',
        example="{{name}}(6) == {{want}}",
    ),
    Task(
        name="bases",
        asks="""
            write an integer in {{what}}
            convert an int to {{what}} text
            show a number in {{what}}
        """,
        cases="""
            name            what                              spec  want
            to_binary       binary                            b     "101101"
            to_octal        octal                             o     "55"
            to_hex          upper-case hexadecimal            X     "2D"
            to_byte         8-digit binary                    08b   "00101101"
            to_colour_part  two-digit lower-case hexadecimal  02x   "2d"
        """,
        code='''
            def {{name}}(number: int) -> str:
                """Write the number in {{what}}."""
                return format(number, "{{spec}}")
        ''',
        example="{{name}}(45) == {{want}}",
    ),
    Task(
        name="labels",
        asks="""
            return "{{low}}" or "{{high}}" for {{what}}, split at {{limit}}
            label {{what}} "{{high}}" from {{limit}} on and "{{low}}" below
            classify {{what}} as "{{low}}" under {{limit}} and "{{high}}" otherwise
        """,
        cases="""
            name        what            arg      type   limit  low    high
            age_group   an age          age      int    18     minor  adult
            grade       a test score    score    int    60     fail   pass
            heat_label  a temperature   degrees  float  25     mild   hot
            size_label  a file size     size     int    4096   small  large
            battery     a charge level  percent  int    20     low    ok
        """,
        code='''
            def {{name}}({{arg}}: {{type}}) -> str:
                """Label {{what}} as {{low}} or {{high}}."""
                return "{{low}}" if {{arg}} < {{limit}} else "{{high}}"
        ''',
        tests="""
            {{name}}({{limit}}) == "{{high}}"
            {{name}}({{limit}} - 1) == "{{low}}"
        """,
    ),
    Task(
        name="change",
        asks="""
            compute the {{what}} from an old to a new value
            return the {{what}} between two values
        """,
        cases="""
            name            what               expr                     want
            percent_change  percentage change  (new - old) / old * 100  25
            growth_factor   growth factor      new / old                1.25
        """,
        code='''
            def {{name}}(old: float, new: float) -> float:
                """Return the {{what}} from old to new."""
                return {{expr}}
        ''',
        example="{{name}}(80, 100) == {{want}}",
        held_out=True,
    ),
)
