"""The closed little world of the bundled sample: word lists, all true where they state facts.

A `World` holds every word that `lm_eval_locos.sources.generate` uses, so that a smaller or larger
one can be passed in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class City:
    """A city, its country and two landmarks in it, with their article if they take one."""

    name: str
    country: str
    landmarks: tuple[str, str]


@dataclass(frozen=True)
class Country:
    """A country with its capital, main language and continent (None where it lies on two)."""

    name: str
    capital: str
    language: str
    continent: str | None


@dataclass(frozen=True)
class World:
    """Word lists; see the module's docstring.

    Attributes:
        aliases: per word the other names that are right answers too.
    """

    people: tuple[str, ...]
    cities: tuple[City, ...]
    countries: tuple[Country, ...]
    rooms: tuple[str, ...]
    objects: tuple[str, ...]
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    adverbs: tuple[str, ...]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


WORLD = World(
    people=tuple(
        """Mary John Sandra Daniel Yuki Anna Bob Carla David Elena Felix Grace Hugo Irene Jonas
        Karen Leo Maya Nina Oscar Paula Quinn Rosa Simon Tara Umar Vera Walter Xenia Yosef Zoe
        Akira Bella Caleb Diana Edgar Fatima George Hanna Igor Julia Kevin Laura Martin Nadia Omar
        Petra Ralph Sofia Tomas Ursula Victor Wendy Ximena Yvonne Zane Amir Boris Chloe
        Dora""".split()
    ),
    cities=(
        City("Paris", "France", ("the Louvre", "the Sorbonne")),
        City("Rome", "Italy", ("the Colosseum", "Trastevere")),
        City("Florence", "Italy", ("the Uffizi", "the Bargello")),
        City("Venice", "Italy", ("the Rialto", "La Fenice")),
        City("Milan", "Italy", ("La Scala", "the Brera")),
        City("Madrid", "Spain", ("the Prado", "the Retiro")),
        City("Granada", "Spain", ("the Alhambra", "the Albaicin")),
        City("Barcelona", "Spain", ("Montjuic", "Tibidabo")),
        City("Berlin", "Germany", ("the Reichstag", "the Pergamon")),
        City("Dresden", "Germany", ("the Zwinger", "the Semperoper")),
        City("Munich", "Germany", ("the Marienplatz", "the Hofbrauhaus")),
        City("Hamburg", "Germany", ("the Elbphilharmonie", "the Reeperbahn")),
        City("Athens", "Greece", ("the Acropolis", "the Parthenon")),
        City("Vienna", "Austria", ("the Hofburg", "the Belvedere")),
        City("Moscow", "Russia", ("the Kremlin", "the Bolshoi")),
        City("London", "England", ("the Tate", "the Barbican")),
        City("Tokyo", "Japan", ("the Skytree", "Sensoji")),
        City("Shanghai", "China", ("the Bund", "Yuyuan")),
        City("Seoul", "Korea", ("Gyeongbokgung", "Namsan")),
        City("Istanbul", "Turkey", ("Topkapi", "Galata")),
        City("Krakow", "Poland", ("Wawel", "the Sukiennice")),
        City("Hyderabad", "India", ("the Charminar", "Golconda")),
        City("Prague", "Czechia", ("Hradcany", "Vysehrad")),
        City("Lisbon", "Portugal", ("the Alfama", "the Chiado")),
        City("Copenhagen", "Denmark", ("Nyhavn", "Rosenborg")),
        City("Oslo", "Norway", ("Akershus", "Holmenkollen")),
        City("Amsterdam", "Netherlands", ("the Rijksmuseum", "the Concertgebouw")),
        City("Budapest", "Hungary", ("the Gellert", "the Szechenyi")),
        City("Salzburg", "Austria", ("Mirabell", "Hohensalzburg")),
        City("Stockholm", "Sweden", ("Skansen", "the Vasa")),
    ),
    countries=(
        Country("France", "Paris", "French", "Europe"),
        Country("Italy", "Rome", "Italian", "Europe"),
        Country("Spain", "Madrid", "Spanish", "Europe"),
        Country("Germany", "Berlin", "German", "Europe"),
        Country("Greece", "Athens", "Greek", "Europe"),
        Country("Austria", "Vienna", "German", "Europe"),
        Country("Russia", "Moscow", "Russian", None),
        Country("England", "London", "English", "Europe"),
        Country("Japan", "Tokyo", "Japanese", "Asia"),
        Country("China", "Beijing", "Chinese", "Asia"),
        Country("Korea", "Seoul", "Korean", "Asia"),
        Country("Turkey", "Ankara", "Turkish", None),
        Country("Poland", "Warsaw", "Polish", "Europe"),
        Country("India", "Delhi", "Hindi", "Asia"),
        Country("Czechia", "Prague", "Czech", "Europe"),
        Country("Portugal", "Lisbon", "Portuguese", "Europe"),
        Country("Denmark", "Copenhagen", "Danish", "Europe"),
        Country("Norway", "Oslo", "Norwegian", "Europe"),
        Country("Netherlands", "Amsterdam", "Dutch", "Europe"),
        Country("Hungary", "Budapest", "Hungarian", "Europe"),
        Country("Sweden", "Stockholm", "Swedish", "Europe"),
    ),
    rooms=("bathroom", "bedroom", "garden", "hallway", "kitchen", "office"),
    objects=("apple", "football", "milk"),
    adjectives=tuple(
        """old quiet heavy pale narrow early gentle wooden distant broken careful silver dusty warm
        plain hidden""".split()
    ),
    nouns=tuple(
        """river market window story ladder station harbor forest teacher painter farmer sailor
        bridge valley engine curtain winter morning""".split()
    ),
    verbs=tuple(
        """crossed repaired noticed followed described painted carried ignored remembered
        studied""".split()
    ),
    adverbs=tuple("slowly again later quietly twice soon".split()),
    aliases={
        "Chinese": ("Mandarin", "Mandarin Chinese"),
        "Czechia": ("Czech Republic", "The Czech Republic"),
        "Delhi": ("New Delhi",),
        "England": ("United Kingdom", "The United Kingdom", "UK", "Great Britain"),
        "Korea": ("South Korea", "Republic of Korea"),
        "Krakow": ("Kraków",),
        "Netherlands": ("The Netherlands", "Holland"),
        "Turkey": ("Türkiye",),
    },
)
