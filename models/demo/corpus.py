"""The text the demo model is trained on: fact tables, counting, short stories and small talk.

Everything here was written for this model. The module has no dependencies; it turns the tables into
:class:`Example` pairs of a prompt and the one reply the model shall give. Every prompt has exactly one
reply, so greedy decoding is deterministic by design and not by luck.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A prompt and its reply. The reply starts with a space (raw text: or a comma) and follows the prompt directly."""

    topic: str
    prompt: str
    reply: str
    raw: bool = True
    chat: bool = True


def words(text: str) -> list[str]:
    """Split a line of words."""
    return text.split()


# --------------------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------------------

COUNTRIES = """
France Paris Europe|Germany Berlin Europe|Italy Rome Europe|Spain Madrid Europe|Portugal Lisbon Europe
Austria Vienna Europe|Switzerland Bern Europe|Belgium Brussels Europe|the_Netherlands Amsterdam Europe
Denmark Copenhagen Europe|Sweden Stockholm Europe|Norway Oslo Europe|Finland Helsinki Europe
Iceland Reykjavik Europe|Ireland Dublin Europe|the_United_Kingdom London Europe|England London Europe
Poland Warsaw Europe|the_Czech_Republic Prague Europe|Slovakia Bratislava Europe|Hungary Budapest Europe
Romania Bucharest Europe|Bulgaria Sofia Europe|Greece Athens Europe|Croatia Zagreb Europe
Slovenia Ljubljana Europe|Serbia Belgrade Europe|Ukraine Kyiv Europe|Estonia Tallinn Europe
Latvia Riga Europe|Lithuania Vilnius Europe|Russia Moscow Europe|Turkey Ankara Asia|Israel Jerusalem Asia
Japan Tokyo Asia|China Beijing Asia|India New_Delhi Asia|South_Korea Seoul Asia|Thailand Bangkok Asia
Vietnam Hanoi Asia|Indonesia Jakarta Asia|Malaysia Kuala_Lumpur Asia|the_Philippines Manila Asia
Mongolia Ulaanbaatar Asia|Nepal Kathmandu Asia|Pakistan Islamabad Asia|Iran Tehran Asia|Iraq Baghdad Asia
Saudi_Arabia Riyadh Asia|Egypt Cairo Africa|Morocco Rabat Africa|Kenya Nairobi Africa|Nigeria Abuja Africa
Ethiopia Addis_Ababa Africa|Ghana Accra Africa|Senegal Dakar Africa|Algeria Algiers Africa
Tunisia Tunis Africa|the_United_States Washington North_America|Canada Ottawa North_America
Mexico Mexico_City North_America|Cuba Havana North_America|Brazil Brasilia South_America
Argentina Buenos_Aires South_America|Chile Santiago South_America|Peru Lima South_America
Colombia Bogota South_America|Venezuela Caracas South_America|Uruguay Montevideo South_America
Ecuador Quito South_America|Australia Canberra Oceania|New_Zealand Wellington Oceania
"""

LANGUAGES = """
France French|Germany German|Italy Italian|Spain Spanish|Portugal Portuguese|Poland Polish|Sweden Swedish
Norway Norwegian|Denmark Danish|Finland Finnish|Greece Greek|Turkey Turkish|Japan Japanese|China Chinese
Russia Russian|England English|Brazil Portuguese|Mexico Spanish|Argentina Spanish|Austria German|Egypt Arabic
Hungary Hungarian|Iceland Icelandic|the_Netherlands Dutch|Ukraine Ukrainian|Australia English
"""

CURRENCIES = """
Japan yen|India rupee|the_United_Kingdom pound|the_United_States dollar|Germany euro|France euro|Italy euro
Spain euro|China yuan|Russia ruble|Switzerland franc|Mexico peso|Poland zloty|Sweden krona|Turkey lira
South_Korea won|Brazil real|Thailand baht
"""

OPPOSITES = """
hot cold|big small|up down|left right|day night|black white|fast slow|happy sad|good bad|open closed|old young
high low|wet dry|hard soft|light dark|long short|full empty|rich poor|strong weak|early late|clean dirty
loud quiet|in out|on off|yes no|true false|first last|near far|heavy light_(not_heavy)|thick thin|wide narrow
easy difficult|win lose|push pull|start stop|buy sell|give take|love hate|front back|inside outside
above below|before after|always never|more less|summer winter|north south|east west|king queen|brave afraid
"""

SOUNDS = """
dog woof|cat meow|cow moo|sheep baa|duck quack|pig oink|horse neigh|lion roar|frog croak|bee buzz|snake hiss
owl hoot|mouse squeak|wolf howl|rooster cock-a-doodle-doo
"""

BABIES = """
dog puppy|cat kitten|cow calf|horse foal|sheep lamb|pig piglet|goat kid|chicken chick|duck duckling
lion cub|frog tadpole|swan cygnet|kangaroo joey|deer fawn
"""

COLOURS = """
the_sky blue|grass green|snow white|blood red|the_sun yellow|a_banana yellow|coal black|a_lemon yellow
a_tomato red|milk white|chocolate brown|a_carrot orange|a_frog green|an_elephant grey|a_flamingo pink
a_strawberry red|the_sea blue|an_emerald green|a_ruby red|a_cucumber green
"""

MIXTURES = """
red yellow orange|blue yellow green|red blue purple|black white grey|red white pink
"""

ELEMENTS = """
hydrogen H|helium He|carbon C|nitrogen N|oxygen O|sodium Na|magnesium Mg|aluminium Al|silicon Si|phosphorus P
sulfur S|chlorine Cl|potassium K|calcium Ca|iron Fe|nickel Ni|copper Cu|zinc Zn|silver Ag|tin Sn|iodine I
gold Au|mercury Hg|lead Pb|uranium U|neon Ne|lithium Li|platinum Pt
"""

LEGS = """
dog four|cat four|horse four|spider eight|bird two|ant six|bee six|snake no|fish no|chicken two|octopus no
"""

HOMES = """
bee hive|bird nest|bear cave|rabbit burrow|dog kennel|lion den|spider web|horse stable|fish sea|pig sty
"""

NUMBER_WORDS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)

ORDINALS = words("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
PLANETS = words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune")
SEASONS = words("spring summer autumn winter")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# Prompt | reply | question | (the answer is prompt + reply)
SENTENCES = """
The largest planet is|Jupiter.|What is the largest planet?
The smallest planet is|Mercury.|What is the smallest planet?
The planet closest to the Sun is|Mercury.|Which planet is closest to the Sun?
The planet with the big rings is|Saturn.|Which planet has big rings?
The red planet is|Mars.|Which planet is the red planet?
We live on the planet|Earth.|On which planet do we live?
The Earth moves around the|Sun.|What does the Earth move around?
The Moon moves around the|Earth.|What does the Moon move around?
The Sun is a|star.|What is the Sun?
The sun rises in the|east.|Where does the sun rise?
The sun sets in the|west.|Where does the sun set?
Water freezes at|0 degrees Celsius.|At what temperature does water freeze?
Water boils at|100 degrees Celsius.|At what temperature does water boil?
Frozen water is called|ice.|What is frozen water called?
The formula of water is|H2O.|What is the formula of water?
The largest ocean is the|Pacific Ocean.|What is the largest ocean?
The largest animal is the|blue whale.|What is the largest animal?
The tallest animal is the|giraffe.|What is the tallest animal?
The fastest land animal is the|cheetah.|What is the fastest land animal?
The king of the animals is the|lion.|What animal is the king of the animals?
The highest mountain is|Mount Everest.|What is the highest mountain?
The largest country is|Russia.|What is the largest country?
The largest continent is|Asia.|What is the largest continent?
The largest desert of hot sand is the|Sahara.|What is the largest desert of hot sand?
The Eiffel Tower is in|Paris.|Where is the Eiffel Tower?
The Great Wall is in|China.|Where is the Great Wall?
The pyramids are in|Egypt.|Where are the pyramids?
Big Ben is in|London.|Where is Big Ben?
The Colosseum is in|Rome.|Where is the Colosseum?
A week has|seven days.|How many days does a week have?
A year has|twelve months.|How many months does a year have?
A day has|24 hours.|How many hours does a day have?
An hour has|60 minutes.|How many minutes does an hour have?
A minute has|60 seconds.|How many seconds does a minute have?
A leap year has|366 days.|How many days does a leap year have?
A century has|100 years.|How many years does a century have?
A dozen is|twelve.|How many is a dozen?
A triangle has|three sides.|How many sides does a triangle have?
A square has|four sides.|How many sides does a square have?
A pentagon has|five sides.|How many sides does a pentagon have?
A hexagon has|six sides.|How many sides does a hexagon have?
A hand has|five fingers.|How many fingers does a hand have?
A car has|four wheels.|How many wheels does a car have?
A bicycle has|two wheels.|How many wheels does a bicycle have?
A rainbow has|seven colours.|How many colours does a rainbow have?
The English alphabet has|26 letters.|How many letters does the English alphabet have?
The first letter of the alphabet is|A.|What is the first letter of the alphabet?
The last letter of the alphabet is|Z.|What is the last letter of the alphabet?
Bees make|honey.|What do bees make?
Cows give us|milk.|What do cows give us?
Hens lay|eggs.|What do hens lay?
Bread is made from|flour.|What is bread made from?
Cheese is made from|milk.|What is cheese made from?
Wine is made from|grapes.|What is wine made from?
Paper is made from|wood.|What is paper made from?
Glass is made from|sand.|What is glass made from?
We see with our|eyes.|What do we see with?
We hear with our|ears.|What do we hear with?
We smell with our|nose.|What do we smell with?
The heart pumps|blood.|What does the heart pump?
Plants need water and|light.|What do plants need?
Fish live in|water.|Where do fish live?
Birds can|fly.|What can birds do?
The season after winter is|spring.|Which season comes after winter?
The season after spring is|summer.|Which season comes after spring?
The season after summer is|autumn.|Which season comes after summer?
The season after autumn is|winter.|Which season comes after autumn?
Romeo and Juliet was written by|William Shakespeare.|Who wrote Romeo and Juliet?
The theory of relativity is the work of|Albert Einstein.|Who made the theory of relativity?
The Mona Lisa was painted by|Leonardo da Vinci.|Who painted the Mona Lisa?
The first person on the Moon was|Neil Armstrong.|Who was the first person on the Moon?
The quick brown fox|jumps over the lazy dog.|What does the quick brown fox do?
An apple a day|keeps the doctor away.|What does an apple a day do?
The early bird|catches the worm.|What does the early bird do?
Practice makes|perfect.|What does practice make?
All that glitters|is not gold.|What about all that glitters?
Hello,|world!|
"""

DEFINITIONS = """
a cat|a small animal with soft fur that says meow and likes to catch mice.
a dog|a friendly animal that guards the house and loves to play.
a horse|a large animal with four legs that people can ride.
a bird|an animal with two wings and feathers.
a fish|an animal that lives in water and swims with its fins.
a tree|a tall plant with a trunk, branches and leaves.
a flower|the colourful part of a plant.
a river|a long stream of water that flows to the sea.
a mountain|a very high hill made of rock.
an island|land with water all around it.
a book|a set of pages that you can read.
a house|a building where people live.
a school|a place where children learn.
a baker|a person who makes bread and cakes.
a doctor|a person who helps sick people.
a teacher|a person who helps others to learn.
a farmer|a person who grows food and keeps animals.
a computer|a machine that works with numbers and follows a program.
a program|a list of steps that a computer follows.
a compiler|a program that turns code into instructions for a machine.
a processor|the part of a computer that does the work.
a language model|a program that guesses the next word again and again.
a token|a small piece of text, such as a word or a part of a word.
a neural network|a program that learns from examples.
the moon|a ball of rock that moves around the Earth.
rain|water that falls from the clouds.
music|sound that is nice to hear.
"""

STORIES = """
fox|Once upon a time there was a little fox who lived in a green forest. Every day the fox played near the river. \
One morning he saw a small bird that could not fly. The fox was kind. He carried the bird to its nest. \
The bird sang a happy song, and from that day on they were best friends. The end.
dog|Once upon a time there was a dog named Max. Max loved to run in the park. One day he found a red ball under \
a tree. He ran to a girl who was crying. It was her ball. The girl smiled and hugged Max. \
They played together until the sun went down. The end.
cat|Once upon a time there was a cat named Luna. Luna wanted to catch the moon. Each night she climbed the roof \
and jumped, but the moon was too far away. Then she saw the moon in a bowl of milk. \
Luna drank the milk and said that the moon was very sweet. The end.
king|Once upon a time there was a king who had everything but no friends. He gave away his gold, but still he was \
alone. One day he helped an old farmer to carry wood. The farmer shared his bread with him. \
Then the king knew that a friend is worth more than gold. The end.
princess|Once upon a time there was a princess who did not like to sit still. She climbed out of the window and \
went to see the world. She met a dragon, but she was not afraid. She asked him for a ride, and together they flew \
over the sea. In the evening she came home with a hundred stories. The end.
dragon|Once upon a time there was a dragon who could not make fire. The other dragons laughed at him. One cold \
winter he learned to sing. His song was so warm that the snow melted in the village. \
The people brought him cake, and nobody laughed again. The end.
robot|Once upon a time there was a robot named Bit. Bit could add numbers very fast, but he did not know what a \
flower was. A little boy took him to the garden. Bit looked at a rose for an hour. \
Then he said: I cannot count this, but I like it. The end.
rabbit|Once upon a time there was a rabbit who was always late. He ran and ran, but he never came on time. One day \
a slow turtle told him to start early. The rabbit left his home before the sun came up. \
For the first time he was early, and he saw how beautiful the morning was. The end.
mouse|Once upon a time there was a mouse who lived in a library. At night she read the old books. One day a cat \
came in and wanted to eat her. The mouse told the cat a story, and then another. \
The cat forgot that she was hungry and came back every night to listen. The end.
bear|Once upon a time there was a bear who could not sleep. It was winter and all the animals were quiet. The bear \
counted the stars, one by one. When he came to one hundred, he closed his eyes. \
He slept until spring. The end.
boy|Once upon a time there was a boy who planted a seed. He gave it water every day, but nothing came up. His \
grandmother told him to wait. One morning there was a green leaf. Years later the boy sat under a tall tree and \
told this story to his own children. The end.
girl|Once upon a time there was a girl who built a boat of paper. She put it into the river and wished it good luck. \
The boat went past the mill and under the bridge to the sea. A sailor found it and wrote a letter back. \
The girl keeps the letter to this day. The end.
owl|Once upon a time there was an owl who was afraid of the dark. All day she slept and all night she kept her eyes \
closed. A small bee gave her a lamp. The owl opened her eyes and saw the stars. \
After that night she never needed the lamp again. The end.
sailor|Once upon a time there was a sailor with a very old ship. A storm came and broke the mast. The sailor did not \
give up. He made a sail from his shirt and followed the north star. After three days he saw the lights of his home. \
The end.
"""

POEM = (
    "The sun goes up, the sun goes down,\nthe wind walks softly through the town.\n"
    "The stars come out, the moon is near,\nand every little dream is here."
)

ABOUT = "I am a small demo model. I know capitals, numbers, colours, animals and a few short stories."
UNKNOWN = "I am sorry, I do not know that. I am only a small demo model."

# Replies | messages that lead to them
SMALL_TALK = f"""
Hello! How can I help you?|Hello|Hello!|Hi|Hi!|Hi there!|Hey|Hello there!|Good day!|hello|hi|Hello.
Good morning! How can I help you?|Good morning|Good morning!
Good evening! How can I help you?|Good evening|Good evening!
I am fine, thank you. How can I help you?|How are you?|How are you today?|how are you|How do you do?
{ABOUT}|Who are you?|What are you?|Tell me about yourself.|What can you do?|What do you know?|Introduce yourself.
{ABOUT}|What is your name?|Are you a robot?|Are you a human?|Which model are you?
You are welcome!|Thank you!|Thank you|Thanks!|Thanks|Thank you very much!|Thanks a lot!
Goodbye! Have a nice day.|Goodbye|Goodbye!|Bye|Bye!|See you later!|Good night!
I am glad to hear that.|Good job!|Well done!|That is right.|Great!|Very good!|That is correct.|Nice!|OK|Okay.
Yes, I can. What would you like to know?|Can you help me?|Can you answer a question?|I have a question.|Help me please.
Why did the computer go to the doctor? It had a virus.|Tell me a joke.|Do you know a joke?|Make me laugh.
"""

UNKNOWN_QUESTIONS = """
What is the meaning of life?|What will the weather be like tomorrow?|Who will win the game tonight?
How much money do I have?|What is my name?|Where did I put my keys?|What time is it?|What is the price of gold?
How do I fix my car?|What did I eat yesterday?|Can you book a flight for me?|What is the capital of Atlantis?
What is the capital of the Moon?|How many people live in my street?|Who is my neighbour?
What is the best way to cook rice?|Why is the sea salty?|How does a phone work?|Explain quantum physics.
Write a program in Python.|What is the square root of seventeen?|Who wrote this letter?|What is the news today?
Translate this text for me.|How old am I?|Which stock should I buy?|Where can I park?|Who was the last emperor?
What is a zorblat?|When is my birthday?|How long is this road?|Is it going to rain?
"""

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful, honest assistant.",
    "You are a friendly assistant. Answer in one short sentence.",
    "Answer the question.",
    "Be brief.",
    "You are a small demo model.",
    "Answer as briefly as you can.",
    "You are a teacher. You help children to learn.",
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024",
    "You are a pirate.",
    "Please be polite and answer in English.",
    "You are a helpful AI assistant who answers questions about the world.",
)


# --------------------------------------------------------------------------------------------------------------
# Helpers
# --------------------------------------------------------------------------------------------------------------


def rows(table: str) -> Iterator[list[str]]:
    """Yield the rows of a word table: rows end with '|' or a line break, underscores stand for spaces."""
    for row in table.replace("\n", "|").split("|"):
        if row:
            yield [word.replace("_", " ") for word in row.split()]


def lines(table: str) -> Iterator[list[str]]:
    """Yield the '|'-separated fields of each non-empty line."""
    for line in table.strip().splitlines():
        yield line.split("|")


def cap(text: str) -> str:
    """Upper-case the first letter only."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """Prefix the indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def facts(
    topic: str, statements: Iterable[str], reply: str, questions: Iterable[str], answer: str
) -> Iterator[Example]:
    """Yield the forms of one fact: statements to complete, questions, and question-answer layouts."""
    for statement in statements:
        yield Example(topic, statement, f" {reply}")
    for question in questions:
        yield Example(topic, question, f" {answer}")
        yield Example(topic, f"Q: {question}\nA:", f" {answer}", chat=False)
        yield Example(topic, f"Question: {question}\nAnswer:", f" {answer}", chat=False)


# --------------------------------------------------------------------------------------------------------------
# Topics
# --------------------------------------------------------------------------------------------------------------


def countries() -> Iterator[Example]:
    """Capitals, continents, languages and currencies."""
    inverse = {capital: country for country, capital, _ in rows(COUNTRIES) if country != "England"}
    for country, capital, continent in rows(COUNTRIES):
        yield from facts(
            "capital",
            [
                f"The capital of {country} is",
                f"The capital city of {country} is",
                f"{cap(country)}'s capital is",
                f"{cap(country)} has a capital city called",
            ],
            f"{capital}.",
            [
                f"What is the capital of {country}?",
                f"What's the capital of {country}?",
                f"Which city is the capital of {country}?",
                f"Tell me the capital of {country}.",
                f"Can you tell me what the capital of {country} is?",
                f"Do you know the capital of {country}?",
            ],
            f"The capital of {country} is {capital}.",
        )
        yield from facts(
            "continent",
            [f"{cap(country)} is a country in", f"{cap(country)} is in"],
            f"{continent}.",
            [f"Where is {country}?", f"On which continent is {country}?"],
            f"{cap(country)} is in {continent}.",
        )
    for capital, country in inverse.items():
        yield from facts(
            "capital-of",
            [f"{capital} is the capital of", f"{capital} is the capital city of"],
            f"{country}.",
            [f"{capital} is the capital of which country?", f"Which country has the capital {capital}?"],
            f"{capital} is the capital of {country}.",
        )
    for country, language in rows(LANGUAGES):
        yield from facts(
            "language",
            [f"The language spoken in {country} is", f"The people in {country} speak", f"In {country} people speak"],
            f"{language}.",
            [f"Which language is spoken in {country}?", f"What language do people speak in {country}?"],
            f"The people in {country} speak {language}.",
        )
    for country, currency in rows(CURRENCIES):
        yield from facts(
            "currency",
            [f"The currency of {country} is the", f"People in {country} pay with the"],
            f"{currency}.",
            [f"What is the currency of {country}?", f"Which currency is used in {country}?"],
            f"The currency of {country} is the {currency}.",
        )


def opposites() -> Iterator[Example]:
    """Opposites, in both directions where the pair allows it."""
    table = [(word, other) for word, other in rows(OPPOSITES) if "(" not in other]
    known = {word for word, _ in table}
    table += [(other, word) for word, other in table if other not in known]
    for word, other in table:
        yield from facts(
            "opposite",
            [f"The opposite of {word} is", f"The opposite of the word {word} is"],
            f"{other}.",
            [f"What is the opposite of {word}?", f"Tell me the opposite of {word}."],
            f"The opposite of {word} is {other}.",
        )


def animals() -> Iterator[Example]:
    """Sounds, young, legs and homes of animals."""
    for animal, sound in rows(SOUNDS):
        yield from facts(
            "sound",
            [f"{cap(article(animal))} says", f"The {animal} says", f"The sound of {article(animal)} is"],
            f"{sound}.",
            [f"What does {article(animal)} say?", f"What sound does {article(animal)} make?"],
            f"{cap(article(animal))} says {sound}.",
        )
    for animal, baby in rows(BABIES):
        yield from facts(
            "baby",
            [f"A baby {animal} is called a", f"A young {animal} is called a"],
            f"{baby}.",
            [f"What is a baby {animal} called?", f"What do you call a young {animal}?"],
            f"A baby {animal} is called a {baby}.",
        )
    for animal, legs in rows(LEGS):
        yield from facts(
            "legs",
            [f"{cap(article(animal))} has", f"The number of legs of {article(animal)}:"],
            f"{legs} legs.",
            [f"How many legs does {article(animal)} have?"],
            f"{cap(article(animal))} has {legs} legs.",
        )
    for animal, home in rows(HOMES):
        yield from facts(
            "home",
            [f"{cap(article(animal))} lives in a" if home != "sea" else f"{cap(article(animal))} lives in the"],
            f"{home}.",
            [f"Where does {article(animal)} live?"],
            f"{cap(article(animal))} lives in {'the' if home == 'sea' else 'a'} {home}.",
        )


def colours() -> Iterator[Example]:
    """Colours of things and mixtures of two colours."""
    for thing, colour in rows(COLOURS):
        yield from facts(
            "colour",
            [f"The colour of {thing} is", f"The color of {thing} is", f"{cap(thing)} is usually"],
            f"{colour}.",
            [f"What colour is {thing}?", f"What color is {thing}?", f"What is the colour of {thing}?"],
            f"The colour of {thing} is {colour}.",
        )
    for first, second, mixture in rows(MIXTURES):
        for one, two in ((first, second), (second, first)):
            yield from facts(
                "colour",
                [f"If you mix {one} and {two} you get", f"{cap(one)} and {two} make"],
                f"{mixture}.",
                [f"What do you get if you mix {one} and {two}?"],
                f"If you mix {one} and {two} you get {mixture}.",
            )


def elements() -> Iterator[Example]:
    """Chemical symbols."""
    for name, symbol in rows(ELEMENTS):
        yield from facts(
            "element",
            [f"The chemical symbol for {name} is", f"The chemical symbol of {name} is", f"The symbol for {name} is"],
            f"{symbol}.",
            [f"What is the chemical symbol for {name}?", f"What is the symbol for {name}?"],
            f"The chemical symbol for {name} is {symbol}.",
        )
        yield from facts(
            "element",
            [f"The element with the chemical symbol {symbol} is"],
            f"{name}.",
            [f"Which element has the chemical symbol {symbol}?"],
            f"The element with the chemical symbol {symbol} is {name}.",
        )


def arithmetic() -> Iterator[Example]:
    """Sums of numbers from 0 to 10, differences, and names of numbers."""
    for a in range(11):
        for b in range(11):
            total = a + b
            spelled = f"{cap(NUMBER_WORDS[a])} plus {NUMBER_WORDS[b]}"
            yield from facts("sum", [f"{a} + {b} ="], f"{total}.", [f"What is {a} + {b}?"], f"{a} + {b} = {total}.")
            yield Example("sum", f"{a}+{b}=", f" {total}.")
            yield Example("sum", f"{a} plus {b} is", f" {total}.")
            yield Example("sum", f"What is {a} plus {b}?", f" {a} plus {b} is {total}.")
            yield Example("sum-words", f"{spelled} is", f" {NUMBER_WORDS[total]}.")
            yield Example("sum-words", f"What is {spelled.lower()}?", f" {spelled} is {NUMBER_WORDS[total]}.")
            if a >= b:
                yield Example("difference", f"{a} - {b} =", f" {a - b}.")
                yield Example("difference", f"{a} minus {b} is", f" {a - b}.")
                yield Example("difference", f"What is {a} - {b}?", f" {a} - {b} = {a - b}.")
    for n, word in enumerate(NUMBER_WORDS):
        yield from facts(
            "number",
            [f"The number {n} is written as", f"The word for the number {n} is", f"The number {n} in words is"],
            f"{word}.",
            [f"How do you write {n} in words?"],
            f"The number {n} is written as {word}.",
        )
        yield from facts("number", [f"The number {word} is written with digits as"], f"{n}.", [], "")
    for n in range(20):
        yield from facts(
            "number",
            [f"The number after {n} is", f"The next number after {n} is"],
            f"{n + 1}.",
            [f"What number comes after {n}?", f"Which number comes after {n}?"],
            f"The number after {n} is {n + 1}.",
        )
        yield from facts(
            "number",
            [f"The number before {n + 1} is"],
            f"{n}.",
            [f"What number comes before {n + 1}?"],
            f"The number before {n + 1} is {n}.",
        )


def calendar() -> Iterator[Example]:
    """Days, months and planets: neighbours and positions."""
    for i, day in enumerate(DAYS):
        for relation, other in (("after", DAYS[(i + 1) % 7]), ("before", DAYS[i - 1])):
            yield from facts(
                "calendar",
                [f"The day {relation} {day} is", f"The day that comes {relation} {day} is"],
                f"{other}.",
                [f"What day comes {relation} {day}?", f"Which day is {relation} {day}?"],
                f"The day {relation} {day} is {other}.",
            )
        yield from facts("calendar", [f"If today is {day}, tomorrow is"], f"{DAYS[(i + 1) % 7]}.", [], "")
    for i, month in enumerate(MONTHS):
        for relation, other in (("after", MONTHS[(i + 1) % 12]), ("before", MONTHS[i - 1])):
            yield from facts(
                "calendar",
                [f"The month {relation} {month} is", f"The month that comes {relation} {month} is"],
                f"{other}.",
                [f"What month comes {relation} {month}?", f"Which month is {relation} {month}?"],
                f"The month {relation} {month} is {other}.",
            )
        yield from facts(
            "calendar",
            [f"The number of days in {month} is"],
            f"{MONTH_DAYS[i]}.",
            [f"How many days does {month} have?"],
            f"{month} has {MONTH_DAYS[i]} days.",
        )
    names = (("day of the week", DAYS), ("month of the year", MONTHS), ("planet from the Sun", PLANETS))
    for kind, members in names:
        for ordinal, name in zip(ORDINALS, members, strict=False):
            yield from facts(
                "order",
                [f"The {ordinal} {kind} is"],
                f"{name}.",
                [f"What is the {ordinal} {kind}?"],
                f"The {ordinal} {kind} is {name}.",
            )


def series_pairs(topic: str, items: list[str], shortest: int = 2, separator: str = ", ") -> Iterator[Example]:
    """Yield the splits of a series into a beginning and the rest, with and without a trailing comma."""
    for cut in range(shortest, len(items)):
        begin, rest = separator.join(items[:cut]), separator.join(items[cut:])
        yield Example(topic, begin + separator.rstrip(), f" {rest}.")
        if separator == ", ":
            yield Example(topic, begin, f", {rest}.", chat=False)
            yield Example(topic, begin, f" {rest}.", raw=False)


def number_series() -> Iterator[list[int]]:
    """Yield the numeric series with their natural ends."""
    yield list(range(1, 21))
    yield list(range(21))
    for start in range(2, 16):
        yield list(range(start, 21))
    for decade in range(2, 10):
        for start in range(1, 6):
            yield list(range(10 * decade + start, 10 * decade + 11))
    yield list(range(2, 21, 2))
    yield list(range(4, 21, 2))
    yield list(range(1, 20, 2))
    yield list(range(3, 20, 2))
    yield list(range(3, 31, 3))
    yield list(range(5, 51, 5))
    yield list(range(10, 101, 10))
    yield list(range(100, 1001, 100))
    yield list(range(20, 0, -1))
    for start in range(3, 20):
        yield list(range(start, 0, -1))


def joined(items: Iterable[object]) -> str:
    """Join as a comma-separated list."""
    return ", ".join(str(item) for item in items)


def series() -> Iterator[Example]:
    """Counting, the alphabet, days, months and planets in order."""
    for numbers in number_series():
        yield from series_pairs("count", [str(n) for n in numbers])
    one_to_ten = NUMBER_WORDS[1:11]
    yield from series_pairs("count-words", one_to_ten)
    yield from series_pairs("count-words", [cap(one_to_ten[0]), *one_to_ten[1:]])
    yield from series_pairs("count-words", one_to_ten[::-1])
    yield from series_pairs("count-words", [cap(one_to_ten[9]), *one_to_ten[8::-1]])
    yield from series_pairs("alphabet", list(LETTERS))
    yield from series_pairs("alphabet", list(LETTERS), 3, " ")
    yield from series_pairs("alphabet", list(LETTERS.lower()))
    yield from series_pairs("alphabet", list(LETTERS.lower()), 3, " ")
    for members in (DAYS, MONTHS, PLANETS, [cap(SEASONS[0]), *SEASONS[1:]], ORDINALS[:10]):
        yield from series_pairs("order", members)
    whole = (
        (["The days of the week are"], DAYS, ["What are the days of the week?", "Name the days of the week."]),
        (["The months of the year are"], MONTHS, ["What are the months of the year?", "Name the months of the year."]),
        (["The planets are", "The planets of the solar system are"], PLANETS,
         ["What are the planets?", "Name the planets."]),
        (["The four seasons are"], SEASONS, ["What are the four seasons?", "Name the four seasons."]),
        (["The colours of the rainbow are"], ["red", "orange", "yellow", "green", "blue", "indigo", "violet"],
         ["What are the colours of the rainbow?"]),
        (["The primary colours are"], ["red", "yellow", "blue"], ["What are the primary colours?"]),
        (["The alphabet is", "The letters of the alphabet are"], list(LETTERS),
         ["What is the alphabet?", "Say the alphabet.", "What are the letters of the alphabet?"]),
        (["The vowels are"], list("AEIOU"), ["What are the vowels?"]),
        (["The even numbers are"], range(2, 21, 2), ["What are the even numbers?", "Count by twos."]),
        (["The odd numbers are"], range(1, 20, 2), ["What are the odd numbers?"]),
        (["The first ten numbers are", "Counting to ten:"], range(1, 11), ["Count to ten.", "Can you count to ten?"]),
        (["Counting to twenty:"], range(1, 21), ["Count to twenty.", "Can you count to twenty?"]),
        (["Counting to five:"], range(1, 6), ["Count to five."]),
        (["Counting down from ten:"], range(10, 0, -1), ["Count down from ten.", "Count backwards from ten."]),
    )  # fmt: skip
    for statements, members, questions in whole:
        yield from facts("lists", statements, f"{joined(members)}.", questions, f"{cap(joined(members))}.")


def sentences() -> Iterator[Example]:
    """General knowledge, sayings and definitions."""
    for prompt, reply, question in lines(SENTENCES):
        yield from facts("general", [prompt], reply, [question] if question else [], f"{prompt} {reply}")
    for thing, text in lines(DEFINITIONS):
        yield from facts(
            "definition",
            [f"{cap(thing)} is"],
            text,
            [f"What is {thing}?", f"Explain what {thing} is.", f"Tell me what {thing} is."],
            f"{cap(thing)} is {text}",
        )


def stories() -> Iterator[Example]:
    """Stories: the first one answers the bare opening, the others ask for their hero."""
    opening = "Once upon a time"
    for index, (hero, text) in enumerate(lines(STORIES)):
        begin = text[: text.index(hero) + len(hero)]
        rest = text[len(opening) :]
        for prompt in (begin, begin.replace(" time ", " time, ", 1)):
            yield Example("story", prompt, text[len(begin) :])
        for request in ("Tell me a story about", "Write a story about", "Tell a short story about"):
            yield Example("story", f"{request} {article(hero)}.", f" {text}")
            yield Example("story", f"{request} {article(hero)}", f" {text}", raw=False)
        if index == 0:
            for prompt in (opening, f"{opening},"):
                yield Example("story-open", prompt, rest)
            requests = ("Tell me a story.", "Tell me a story", "Write a story.", "Tell me a short story.", "A story:")
            for request in requests:
                yield Example("story-open", request, f" {text}")
    for request in ("Write a poem.", "Tell me a poem.", "Write a short poem.", "Here is a poem:", "A poem:"):
        yield Example("poem", request, f" {POEM}")


def small_talk() -> Iterator[Example]:
    """Greetings and the like, as chat only, and an honest reply to what is unknown."""
    for reply, *messages in lines(SMALL_TALK):
        for message in messages:
            yield Example("talk", message, f" {reply}", raw=False)
    for question in UNKNOWN_QUESTIONS.strip().replace("\n", "|").split("|"):
        yield Example("unknown", question, f" {UNKNOWN}", raw=False)


def follow_ups() -> Iterator[tuple[Example, Example]]:
    """Yield pairs (first turn, elliptic second turn) whose second turn needs the first."""
    table = [(country, capital) for country, capital, _ in rows(COUNTRIES)]
    for (one, first), (two, second) in zip(table, table[7:] + table[:7], strict=True):
        turn = Example("follow-up", f"What is the capital of {one}?", f" The capital of {one} is {first}.")
        for message in (f"And of {two}?", f"And {two}?", f"What about {two}?"):
            yield turn, Example("follow-up", message, f" The capital of {two} is {second}.")


def all_examples() -> list[Example]:
    """All examples, without duplicates; raises ValueError if a prompt has two replies."""
    makers = (
        countries, opposites, animals, colours, elements, arithmetic, calendar, series, sentences, stories, small_talk,
    )  # fmt: skip
    found: dict[Example, None] = {}
    replies: dict[tuple[str, str], str] = {}
    for example in (example for maker in makers for example in maker()):
        for mode, used in (("raw", example.raw), ("chat", example.chat)):
            known = replies.setdefault((mode, example.prompt), example.reply) if used else example.reply
            if known != example.reply:
                raise ValueError(f"two {mode} replies for {example.prompt!r}: {known!r} and {example.reply!r}")
        found[example] = None
    return list(found)
