"""The sentences that a goal is put into: polite, terse, formal, chatty."""

from __future__ import annotations

# {goal} is an imperative ("count the words"), {Goal} the same with a capital. A regex has a
# noun instead ("dates like 2024-05-31").
FRAMES = {
    "python": (
        "Write a Python function to {goal}.",
        "I need a Python function to {goal}.",
        "Could you write a function to {goal}?",
        "Python: {goal}",
        "Please write some Python to {goal}.",
        "In Python, can you {goal}?",
        "In Python, how do I {goal}?",
        "Give me a short function to {goal}.",
        "{Goal}.",
        "python function, {goal}",
        "Show me the Python to {goal}.",
        "I'm trying to {goal}. Any Python for that?",
        "quick helper needed: {goal}",
        "Implement a helper to {goal}.",
        "Help me {goal}. Python, please.",
        "I want to {goal}. What would the function look like?",
        "Using only the standard library, {goal}.",
        "My script has to {goal}. Can you write that function?",
    ),
    "sql": (
        "Write a SQL query to {goal}.",
        "SQL: {goal}",
        "I need a query to {goal}.",
        "With SQL, could you {goal}?",
        "In SQL, how do I {goal}?",
        "{Goal}. SQL, please.",
        "sql to {goal}",
        "Give me one SQL statement to {goal}.",
    ),
    "shell": (
        "Give me a shell command to {goal}.",
        "Bash: {goal}",
        "In the terminal, how do I {goal}?",
        "Shell one-liner to {goal}?",
        "From the command line: {goal}",
        "I need one line of bash to {goal}.",
        "Which Linux command lets me {goal}?",
        "bash, {goal}",
    ),
    "regex": (
        "Write a regex that matches {goal}.",
        "Regex for {goal}",
        "I need a regular expression for {goal}.",
        "Could you give me a regex matching {goal}?",
        "What regex accepts only {goal}?",
        "regex please: {goal}",
        "Please write a pattern for {goal}, as a regex.",
    ),
}


def frame(kind: str, goal: str, number: int) -> str:
    """Put a goal into one of the sentences of its kind."""
    frames = FRAMES[kind]
    return frames[number % len(frames)].format(goal=goal, Goal=goal[0].upper() + goal[1:])
