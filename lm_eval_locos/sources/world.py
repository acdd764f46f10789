"""The closed little world of the bundled sample: word lists, all true where they state facts.

A `World` holds every word that `lm_eval_locos.sources.generate` uses, so that a smaller or larger
one can be passed in its place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class City:
    """A city, its country and two landmarks that stand in it (named with their article)."""

    name: str
    country: str
    landmarks: tuple[str, str]


@dataclass(frozen=True)
class Country:
    """A country with its capital, main language and continent."""

    name: str
    capital: str
    language: str
    continent: str


@dataclass(frozen=True)
class World:
    """Word lists; see the module's docstring."""

    people: tuple[str, ...]
    cities: tuple[City, ...]
    countries: tuple[Country, ...]
    rooms: tuple[str, ...]
    objects: tuple[str, ...]
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    adverbs: tuple[str, ...]


def _city(name: str, country: str, first: str, second: str) -> City:
    return City(name, country, (f"the {first}", f"the {second}"))


WORLD = World(
    people=tuple(
        """Mary John Sandra Daniel Yuki Anna Bob Carla David Elena Felix Grace Hugo Irene Jonas
        Karen Leo Maya Nina Oscar Paula Quinn Rosa Simon Tara Umar Vera Walter Xenia Yosef Zoe
        Akira Bella Caleb Diana Edgar Fatima George Hanna Igor Julia Kevin Laura Martin Nadia Omar
        Petra Ralph Sofia Tomas Ursula Victor Wendy Ximena Yvonne Zane Amir Boris Chloe
        Dora""".split()
    ),
    cities=(
        _city("Paris", "France", "Louvre", "Sorbonne"),
        _city("Rome", "Italy", "Colosseum", "Pantheon"),
        _city("Florence", "Italy", "Uffizi", "Bargello"),
        _city("Venice", "Italy", "Rialto", "Fenice"),
        _city("Milan", "Italy", "Scala", "Brera"),
        _city("Madrid", "Spain", "Prado", "Retiro"),
        _city("Granada", "Spain", "Alhambra", "Albaicin"),
        _city("Barcelona", "Spain", "Sagrada", "Rambla"),
        _city("Berlin", "Germany", "Reichstag", "Pergamon"),
        _city("Dresden", "Germany", "Zwinger", "Semperoper"),
        _city("Munich", "Germany", "Marienplatz", "Hofbrauhaus"),
        _city("Hamburg", "Germany", "Elbphilharmonie", "Reeperbahn"),
        _city("Athens", "Greece", "Acropolis", "Parthenon"),
        _city("Vienna", "Austria", "Hofburg", "Belvedere"),
        _city("Moscow", "Russia", "Kremlin", "Bolshoi"),
        _city("London", "England", "Tate", "Barbican"),
        _city("Tokyo", "Japan", "Skytree", "Sensoji"),
        _city("Shanghai", "China", "Bund", "Yuyuan"),
        _city("Seoul", "Korea", "Gyeongbokgung", "Namsan"),
        _city("Istanbul", "Turkey", "Topkapi", "Galata"),
        _city("Krakow", "Poland", "Wawel", "Sukiennice"),
        _city("Hyderabad", "India", "Charminar", "Golconda"),
        _city("Prague", "Czechia", "Hradcany", "Vysehrad"),
        _city("Lisbon", "Portugal", "Alfama", "Belem"),
        _city("Copenhagen", "Denmark", "Tivoli", "Rosenborg"),
        _city("Oslo", "Norway", "Vigeland", "Holmenkollen"),
        _city("Amsterdam", "Netherlands", "Rijksmuseum", "Concertgebouw"),
        _city("Budapest", "Hungary", "Gellert", "Szechenyi"),
        _city("Salzburg", "Austria", "Mirabell", "Hohensalzburg"),
        _city("Stockholm", "Sweden", "Skansen", "Vasa"),
    ),
    countries=(
        Country("France", "Paris", "French", "Europe"),
        Country("Italy", "Rome", "Italian", "Europe"),
        Country("Spain", "Madrid", "Spanish", "Europe"),
        Country("Germany", "Berlin", "German", "Europe"),
        Country("Greece", "Athens", "Greek", "Europe"),
        Country("Austria", "Vienna", "German", "Europe"),
        Country("Russia", "Moscow", "Russian", "Europe"),
        Country("England", "London", "English", "Europe"),
        Country("Japan", "Tokyo", "Japanese", "Asia"),
        Country("China", "Beijing", "Chinese", "Asia"),
        Country("Korea", "Seoul", "Korean", "Asia"),
        Country("Turkey", "Ankara", "Turkish", "Asia"),
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
)
