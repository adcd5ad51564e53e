"""The course: seven chapters as labs, each a notebook of marimo in English (`en/`) and Chinese
(`zh/`).

In a lab, a reader commits to a prediction (`ask`), runs ranks or the simulator, and compares.
`chapters` lists the labs, `lab` returns the file of one.

>>> [chapter.name for chapter in chapters()][:3]
['parallelism', 'primitives', 'algorithms']
>>> lab("2").name, lab("primitives", "zh").parent.name
('chapter2_primitives.py', 'zh')
"""

from unisono.course.chapters import LANGUAGES, Chapter, chapters, lab
from unisono.course.elements import ask, picture, player, wait_for

__all__ = ["LANGUAGES", "Chapter", "ask", "chapters", "lab", "picture", "player", "wait_for"]
