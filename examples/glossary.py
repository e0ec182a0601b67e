"""An environment of verifiers: the policy looks made-up words up with a tool, and answers with
their meaning. As a program it is the server of the tool.
"""

import verifiers.v1 as vf

__all__ = ["Glossary"]
WORDS = {"blorp": "a sort of umbrella", "fendle": "rain at noon", "tavel": "to walk backwards"}


class Lookup(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = "glossary"

    @vf.tool
    def lookup(self, word: str) -> str:
        """Look a word up in the glossary."""
        return WORDS.get(word.lower(), f"{word!r} is not in the glossary")


class Question(vf.TaskData):
    word: str


class Define(vf.Task[Question, vf.State]):
    @vf.reward
    async def is_right(self, trace) -> float:
        return float(WORDS[self.data.word] in trace.last_reply)

    @vf.reward(weight=0.2)
    async def has_looked(self, trace) -> float:
        return float(any(WORDS[self.data.word] in m.content for m in trace.tool_messages))

    @vf.metric
    async def counts(self, trace) -> dict[str, float]:
        return {"num_replies": trace.num_turns, "num_results": len(trace.tool_messages)}


class Glossary(vf.Taskset[Define, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config) -> list[vf.Toolset]:
        return [Lookup(vf.SharedToolsetConfig())]

    def load(self) -> list[Define]:
        return [Define(Question(prompt=f"What does {w!r} mean?", word=w)) for w in WORDS]


if __name__ == "__main__":
    Lookup.run()
