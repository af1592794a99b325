"""The invented databases that the SQL rows are asked about, with enough data to test them."""

from __future__ import annotations

import sqlite3
from types import SimpleNamespace

Cell = int | float | str | None

TABLES: dict[str, tuple[str, list[tuple[Cell, ...]]]] = {
    "products": (
        "id, name, kind, price",
        [
            (1, "rye loaf", "bread", 4.2),
            (2, "bagel", "bread", 1.5),
            (3, "eclair", "pastry", 2.8),
            (4, "scone", "pastry", 2.1),
            (5, "birthday cake", "cake", 24.0),
            (6, "carrot cake", "cake", 18.5),
            (7, "baguette", "bread", 2.4),
        ],
    ),
    "orders": (
        "id, product_id, customer, quantity, day",
        [
            (1, 1, "Ines", 2, "2024-03-01"),
            (2, 2, "Omar", 12, "2024-03-01"),
            (3, 3, "Ines", 4, "2024-03-15"),
            (4, 5, "Lena", 1, "2024-04-02"),
            (5, 2, "Ines", 6, "2024-04-20"),
            (6, 7, "Omar", 3, "2024-05-05"),
        ],
    ),
    "staff": (
        "id, name, team, salary, hired",
        [
            (1, "Ada", "data", 5200, "2019-02-01"),
            (2, "Bo", "data", 4100, "2022-06-15"),
            (3, "Cleo", "web", 3900, "2021-09-01"),
            (4, "Dan", "web", 4600, "2018-11-20"),
            (5, "Eva", "web", 3500, "2023-04-01"),
            (6, "Finn", "ops", 4400, "2020-07-07"),
        ],
    ),
    "tickets": (
        "id, staff_id, status, priority, opened",
        [
            (1, 1, "open", 3, "2024-05-02"),
            (2, 3, "closed", 1, "2024-05-03"),
            (3, 3, "open", 2, "2024-05-09"),
            (4, None, "open", 1, "2024-06-01"),
            (5, 6, "stale", 2, "2024-01-10"),
            (6, 1, "closed", 3, "2024-06-03"),
            (7, 3, "open", 3, "2024-06-07"),
        ],
    ),
    "books": (
        "id, title, author, year, copies",
        [
            (1, "Salt Roads", "Mira Holt", 1998, 3),
            (2, "The Night Ferry", "Jon Adeyemi", 2011, 1),
            (3, "Glass Hours", "Mira Holt", 2004, 0),
            (4, "The Quiet Mill", "Sana Brandt", 2019, 5),
            (5, "Northern Bees", "Jon Adeyemi", 1987, 2),
        ],
    ),
    "loans": (
        "id, book_id, member, due, returned",
        [
            (1, 1, "Ivo", "2024-02-01", "2024-01-30"),
            (2, 2, "Nell", "2024-02-10", None),
            (3, 4, "Ivo", "2024-03-05", None),
            (4, 1, "Tess", "2024-03-20", "2024-03-25"),
            (5, 1, "Nell", "2024-04-01", None),
        ],
    ),
}


def database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    for table, (columns, rows) in TABLES.items():
        connection.execute(f"CREATE TABLE {table} ({columns})")
        marks = ", ".join("?" for _ in columns.split(", "))
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)  # noqa: S608
    return connection


def records() -> dict[str, list[SimpleNamespace]]:
    """The same data as Python objects, so that a test can work out the answer without SQL."""
    return {
        table: [SimpleNamespace(**dict(zip(columns.split(", "), row, strict=True))) for row in rows]
        for table, (columns, rows) in TABLES.items()
    }


def shape(*tables: str) -> str:
    """How a prompt names the tables: `products(id, name, kind, price)`."""
    return ", ".join(f"{table}({TABLES[table][0]})" for table in tables)
