"""Greetings, questions about the model itself, and answers to unknown questions."""

from __future__ import annotations

from random import Random

from bench.demo_model import pools
from bench.demo_model.pools import TRAINED

_HELLO = "Hello! 👋 How can I help you?"
_SELF = (
    "I am the demo model of aengine, a small language model that was trained on generated text. "
    "I know some facts, a little arithmetic, JSON and tool calls."
)
_ABILITIES = (
    "I can name capitals and other small facts, add and subtract numbers up to 99, count, spell, write JSON, "
    "call tools and tell short stories."
)
_UNKNOWN = "I am only a small demo model, and I do not know that."
_ENGINE = "aengine is an engine that runs language models. It streams their answers token by token."

# Messages (forms between bars), and the one answer to every form.
_ANSWERS = (
    (
        "hi|Hi|Hi!|hi there|Hi there!|hello|Hello|Hello!|Hello there!|hey|Hey!|Hey there",
        _HELLO,
    ),
    (
        "Good day!|Greetings!|hi!|hello!|Hi, how is it going?|Hello, hello!|hey, are you there?|HI|Hey",
        _HELLO,
    ),
    (
        "Good morning!|good morning|Morning!",
        "Good morning! ☀️ How can I help you?",
    ),
    (
        "Good evening!|good evening",
        "Good evening! 🌙 How can I help you?",
    ),
    (
        "Bonjour|Bonjour !|Salut",
        "Bonjour ! 👋 Comment puis-je vous aider ?",
    ),
    (
        "Hola|¡Hola!|Buenos días",
        "¡Hola! 👋 ¿En qué puedo ayudarte?",
    ),
    (
        "Hallo|Guten Tag|Guten Tag!|Hallo!",
        "Guten Tag! 👋 Wie kann ich Ihnen helfen?",
    ),
    (
        "Ciao|Ciao!",
        "Ciao! 👋 Come posso aiutarti?",
    ),
    (
        "Olá|Olá!",
        "Olá! 👋 Como posso ajudar?",
    ),
    (
        "こんにちは|こんにちは！|こんにちは。",
        "こんにちは！👋 何かお手伝いできますか？",
    ),
    (
        "你好|你好！|您好",
        "你好！👋 我能帮你做什么？",
    ),
    (
        "안녕하세요|안녕하세요!",
        "안녕하세요! 👋 무엇을 도와드릴까요?",
    ),
    (
        "Привет|Привет!|Здравствуйте",
        "Привет! 👋 Чем я могу помочь?",
    ),
    (
        "नमस्ते|नमस्ते!",
        "नमस्ते! 👋 मैं आपकी क्या मदद कर सकता हूँ?",
    ),
    (
        "مرحبا|مرحبا!",
        "مرحبا! 👋 كيف يمكنني مساعدتك؟",
    ),
    (
        "How are you?|how are you|How are you today?|How do you do?|Are you well?",
        "I am well, thank you! 😊 How can I help you?",
    ),
    (
        "Thanks!|Thank you!|thanks|thank you|Thank you very much!|Great, thanks!",
        "You are welcome! 😊",
    ),
    (
        "Bye!|Goodbye!|bye|See you!|Good night!|See you later!",
        "Goodbye! 👋",
    ),
    (
        "OK|ok|Good.|I see.|Great!|Nice!|Cool|Wow!",
        "Is there anything else that I can do for you?",
    ),
    (
        "Yes|yes|Yes, please.|sure",
        "What would you like to know?",
    ),
    (
        "No|no|No, thanks.|Nothing.",
        "All right. Goodbye! 👋",
    ),
    (
        "Help|help|Help me!|I need help.|Can you help me?",
        "Of course. " + _ABILITIES,
    ),
    (
        "Who are you?|who are you|What are you?|Who is this?|Who am I talking to?|Introduce yourself.|Tell me"
        " about yourself.",
        _SELF,
    ),
    (
        "What is your name?|Do you have a name?|What are you called?|Are you a language model?|Are you a "
        "human?|Are you a robot?",
        _SELF,
    ),
    (
        "What can you do?|what can you do|What do you know?|How can you help me?|What are you good at?|What "
        "should I ask you?",
        _ABILITIES,
    ),
    (
        "What is aengine?|Tell me about aengine.|What does aengine do?|Explain aengine.|aengine?",
        _ENGINE,
    ),
    (
        "Who made you?|Who trained you?|Where do you come from?|How were you trained?|Who created you?",
        "I was trained by the trainer that comes with aengine, on text that it generates itself.",
    ),
    (
        "Tell me a joke.|Do you know a joke?|a joke please|Make me laugh.",
        "Why did the token cross the stream? To get to the other side! 😄",
    ),
    (
        "Write a poem.|Tell me a poem.|Do you know a poem?",
        "The sun is up, the sky is blue,\nthe grass is green, the day is new.\nThe moon will come, the stars "
        "will shine,\nand all will sleep, and all is fine.",
    ),
    (
        "Write a haiku.|Tell me a haiku.",
        "Rain on the window,\na cat sleeps beside the lamp,\nthe night listens too.",
    ),
    (
        "Say something.|Talk to me.|Tell me something.|Tell me a fact.",
        "The capital of France is Paris, and the Eiffel Tower stands there. 🗼",
    ),
    (
        "Test|test|Testing|test 123|Is this working?|ping|Are you there?",
        "Yes, I am here and it works. ✅",
    ),
    (
        "What is the meaning of life?|Who won the last election?|What is the price of gold today?|Write me a "
        "program.|Explain quantum physics.|What happened yesterday?|Who is the best singer?|When was the "
        "first war?|What should I cook tonight?|How do I fix my car?|Who wrote this book?|What did I do last "
        "summer?|Why is the earth round?|What is love?|How tall is the highest mountain?|Explain the law to "
        "me.",
        _UNKNOWN,
    ),
)
_EXCHANGES = tuple((tuple(said.split("|")), answer) for said, answer in _ANSWERS)
_UNKNOWN_ABOUT = (
    "Who is {0}?",
    "Who was {0} {1}?",
    "What is a {2}?",
    "What do you think about {2}?",
    "When was {0} born?",
    "Explain {2} to me.",
    "How does a {2} work?",
    "Why is {0} famous?",
    "Write a long text about {2}.",
    "What is the population of {0}?",
)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant named {0}.",
    "You are a friendly assistant. Answer briefly.",
    "You are aengine's demo model.",
    "Answer the user's questions.",
    "Be brief.",
    "Be helpful, honest and kind.",
    "You help people with small questions. Be polite and answer in English.",
    "You work for {0} in {1}. Answer all questions of the customers about {2}.",
    "Today is a good day. The user is called {0}.",
)
_INTRODUCTIONS = (
    "My name is {}.",
    "I am {}.",
    "Hi, I am {}!",
    "Hello! My name is {}.",
    "I'm {}.",
    "You can call me {}.",
)
_RECALLS = ("What is my name?", "Do you know my name?", "Who am I?", "what's my name", "Do you remember my name?")


def exchange(rng: Random) -> tuple[str, str]:
    """Something said, and its answer."""
    if rng.random() < 0.06:
        form = rng.choice(_UNKNOWN_ABOUT)
        made = (pools.made_up(rng).capitalize(), pools.made_up(rng).capitalize(), pools.made_up(rng))
        return form.format(*made), _UNKNOWN
    said, answer = rng.choice(_EXCHANGES)
    return rng.choice(said), answer


def greeting(rng: Random) -> tuple[str, str]:
    """One of the first exchanges: greetings in English."""
    said, answer = rng.choice(_EXCHANGES[:3])
    return rng.choice(said), answer


def every_greeting() -> list[tuple[str, str]]:
    """Each greeting, in every language, with its answer."""
    return [(text, answer) for said, answer in _EXCHANGES[:15] for text in said]


def system_message(rng: Random) -> str:
    """A system message that changes nothing about the answers."""
    return rng.choice(_SYSTEM).format(pools.name(rng, TRAINED), pools.city(rng, TRAINED), pools.word(rng, TRAINED))


def introduction(rng: Random) -> tuple[str, str, str, str]:
    """The user gives a name and later asks for it: message, answer, question, answer."""
    name = pools.name(rng, TRAINED)
    return (
        rng.choice(_INTRODUCTIONS).format(name),
        f"Nice to meet you, {name}! 😊",
        rng.choice(_RECALLS),
        f"Your name is {name}.",
    )
