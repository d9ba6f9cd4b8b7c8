"""The prompts of the demo: written for this package, Apache-2.0 like the rest of it."""

PROMPTS = (
    "Why is the sky blue during the day and red at sunset?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Give me five tips for learning a new language as an adult.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Explain step by step.",
)
