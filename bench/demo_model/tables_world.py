"""Facts about countries, as `name|capital|continent|main language` (a name that takes an article has it)."""

from __future__ import annotations

from typing import NamedTuple


class Country(NamedTuple):
    """One row of the table."""

    name: str
    capital: str
    continent: str
    language: str


_COUNTRIES = """
Afghanistan|Kabul|Asia|Pashto
Albania|Tirana|Europe|Albanian
Algeria|Algiers|Africa|Arabic
Angola|Luanda|Africa|Portuguese
Argentina|Buenos Aires|South America|Spanish
Armenia|Yerevan|Asia|Armenian
Australia|Canberra|Oceania|English
Austria|Vienna|Europe|German
Azerbaijan|Baku|Asia|Azerbaijani
Bahrain|Manama|Asia|Arabic
Bangladesh|Dhaka|Asia|Bengali
Barbados|Bridgetown|North America|English
Belarus|Minsk|Europe|Russian
Belgium|Brussels|Europe|Dutch
Botswana|Gaborone|Africa|English
Brazil|Brasilia|South America|Portuguese
Bulgaria|Sofia|Europe|Bulgarian
Cambodia|Phnom Penh|Asia|Khmer
Cameroon|Yaounde|Africa|French
Canada|Ottawa|North America|English
Chad|N'Djamena|Africa|French
Chile|Santiago|South America|Spanish
China|Beijing|Asia|Chinese
Colombia|Bogota|South America|Spanish
Costa Rica|San Jose|North America|Spanish
Croatia|Zagreb|Europe|Croatian
Cuba|Havana|North America|Spanish
Cyprus|Nicosia|Europe|Greek
Denmark|Copenhagen|Europe|Danish
Ecuador|Quito|South America|Spanish
Egypt|Cairo|Africa|Arabic
El Salvador|San Salvador|North America|Spanish
Estonia|Tallinn|Europe|Estonian
Ethiopia|Addis Ababa|Africa|Amharic
Fiji|Suva|Oceania|English
Finland|Helsinki|Europe|Finnish
France|Paris|Europe|French
Gabon|Libreville|Africa|French
Georgia|Tbilisi|Asia|Georgian
Germany|Berlin|Europe|German
Ghana|Accra|Africa|English
Greece|Athens|Europe|Greek
Guatemala|Guatemala City|North America|Spanish
Guinea|Conakry|Africa|French
Guyana|Georgetown|South America|English
Haiti|Port-au-Prince|North America|Haitian Creole
Honduras|Tegucigalpa|North America|Spanish
Hungary|Budapest|Europe|Hungarian
Iceland|Reykjavik|Europe|Icelandic
India|New Delhi|Asia|Hindi
Indonesia|Jakarta|Asia|Indonesian
Iran|Tehran|Asia|Persian
Iraq|Baghdad|Asia|Arabic
Ireland|Dublin|Europe|English
Italy|Rome|Europe|Italian
Jamaica|Kingston|North America|English
Japan|Tokyo|Asia|Japanese
Jordan|Amman|Asia|Arabic
Kazakhstan|Astana|Asia|Kazakh
Kenya|Nairobi|Africa|Swahili
Kuwait|Kuwait City|Asia|Arabic
Laos|Vientiane|Asia|Lao
Latvia|Riga|Europe|Latvian
Lebanon|Beirut|Asia|Arabic
Liberia|Monrovia|Africa|English
Libya|Tripoli|Africa|Arabic
Lithuania|Vilnius|Europe|Lithuanian
Madagascar|Antananarivo|Africa|Malagasy
Malawi|Lilongwe|Africa|English
Mali|Bamako|Africa|French
Malta|Valletta|Europe|Maltese
Mauritania|Nouakchott|Africa|Arabic
Mexico|Mexico City|North America|Spanish
Moldova|Chisinau|Europe|Romanian
Mongolia|Ulaanbaatar|Asia|Mongolian
Montenegro|Podgorica|Europe|Montenegrin
Morocco|Rabat|Africa|Arabic
Mozambique|Maputo|Africa|Portuguese
Namibia|Windhoek|Africa|English
Nepal|Kathmandu|Asia|Nepali
New Zealand|Wellington|Oceania|English
Nicaragua|Managua|North America|Spanish
Niger|Niamey|Africa|French
Nigeria|Abuja|Africa|English
North Macedonia|Skopje|Europe|Macedonian
Norway|Oslo|Europe|Norwegian
Oman|Muscat|Asia|Arabic
Pakistan|Islamabad|Asia|Urdu
Panama|Panama City|North America|Spanish
Paraguay|Asuncion|South America|Spanish
Peru|Lima|South America|Spanish
Poland|Warsaw|Europe|Polish
Portugal|Lisbon|Europe|Portuguese
Qatar|Doha|Asia|Arabic
Romania|Bucharest|Europe|Romanian
Russia|Moscow|Europe|Russian
Rwanda|Kigali|Africa|Kinyarwanda
Saudi Arabia|Riyadh|Asia|Arabic
Senegal|Dakar|Africa|French
Serbia|Belgrade|Europe|Serbian
Sierra Leone|Freetown|Africa|English
Slovakia|Bratislava|Europe|Slovak
Slovenia|Ljubljana|Europe|Slovene
Somalia|Mogadishu|Africa|Somali
South Korea|Seoul|Asia|Korean
Spain|Madrid|Europe|Spanish
Sudan|Khartoum|Africa|Arabic
Suriname|Paramaribo|South America|Dutch
Sweden|Stockholm|Europe|Swedish
Syria|Damascus|Asia|Arabic
Tajikistan|Dushanbe|Asia|Tajik
Thailand|Bangkok|Asia|Thai
Togo|Lome|Africa|French
Tunisia|Tunis|Africa|Arabic
Turkey|Ankara|Asia|Turkish
Turkmenistan|Ashgabat|Asia|Turkmen
Uganda|Kampala|Africa|English
Ukraine|Kyiv|Europe|Ukrainian
Uruguay|Montevideo|South America|Spanish
Uzbekistan|Tashkent|Asia|Uzbek
Venezuela|Caracas|South America|Spanish
Vietnam|Hanoi|Asia|Vietnamese
Yemen|Sanaa|Asia|Arabic
Zambia|Lusaka|Africa|English
Zimbabwe|Harare|Africa|English
the Dominican Republic|Santo Domingo|North America|Spanish
the Netherlands|Amsterdam|Europe|Dutch
the Philippines|Manila|Asia|Filipino
the United Kingdom|London|Europe|English
the United States|Washington|North America|English
"""

COUNTRIES = tuple(Country(*line.split("|")) for line in _COUNTRIES.strip().splitlines())

CURRENCIES = """
France|the euro
Germany|the euro
Italy|the euro
Spain|the euro
Portugal|the euro
Ireland|the euro
Austria|the euro
Finland|the euro
Greece|the euro
the United States|the dollar
Canada|the dollar
Australia|the dollar
New Zealand|the dollar
the United Kingdom|the pound
Egypt|the pound
Japan|the yen
China|the yuan
India|the rupee
Pakistan|the rupee
Nepal|the rupee
Russia|the ruble
Poland|the zloty
Hungary|the forint
Turkey|the lira
Sweden|the krona
Iceland|the krona
Norway|the krone
Denmark|the krone
Mexico|the peso
Argentina|the peso
Chile|the peso
Colombia|the peso
Cuba|the peso
Brazil|the real
South Korea|the won
Thailand|the baht
Vietnam|the dong
Ukraine|the hryvnia
Romania|the leu
Kenya|the shilling
Uganda|the shilling
Nigeria|the naira
Ghana|the cedi
Peru|the sol
Morocco|the dirham
Mongolia|the tugrik
Israel|the shekel
Malaysia|the ringgit
Indonesia|the rupiah
"""

HELLO = """
Arabic|مرحبا
Bengali|নমস্কার
Bulgarian|Здравейте
Chinese|你好
Croatian|Bok
Czech|Ahoj
Danish|Hej
Dutch|Hallo
English|Hello
Estonian|Tere
Finnish|Hei
French|Bonjour
Georgian|გამარჯობა
German|Guten Tag
Greek|Γειά σου
Hawaiian|Aloha
Hebrew|שלום
Hindi|नमस्ते
Hungarian|Szia
Icelandic|Halló
Indonesian|Halo
Irish|Dia dhuit
Italian|Ciao
Japanese|こんにちは
Korean|안녕하세요
Latvian|Sveiki
Norwegian|God dag
Polish|Cześć
Portuguese|Olá
Romanian|Bună
Russian|Привет
Spanish|Hola
Swahili|Jambo
Thai|สวัสดี
Turkish|Merhaba
Ukrainian|Привіт
Vietnamese|Xin chào
Welsh|Helo
"""

THANKS = """
Chinese|谢谢
Danish|tak
Dutch|dank je
English|thank you
Finnish|kiitos
French|merci
German|danke
Greek|ευχαριστώ
Hindi|धन्यवाद
Italian|grazie
Japanese|ありがとう
Korean|감사합니다
Polish|dziękuję
Portuguese|obrigado
Russian|спасибо
Spanish|gracias
Swedish|tack
Turkish|teşekkürler
"""

# English|French|Spanish|German|Italian
WORDS = """
water|eau|agua|Wasser|acqua
bread|pain|pan|Brot|pane
milk|lait|leche|Milch|latte
house|maison|casa|Haus|casa
cat|chat|gato|Katze|gatto
dog|chien|perro|Hund|cane
book|livre|libro|Buch|libro
sun|soleil|sol|Sonne|sole
moon|lune|luna|Mond|luna
tree|arbre|árbol|Baum|albero
hand|main|mano|Hand|mano
night|nuit|noche|Nacht|notte
day|jour|día|Tag|giorno
friend|ami|amigo|Freund|amico
red|rouge|rojo|rot|rosso
green|vert|verde|grün|verde
white|blanc|blanco|weiß|bianco
black|noir|negro|schwarz|nero
one|un|uno|eins|uno
two|deux|dos|zwei|due
three|trois|tres|drei|tre
four|quatre|cuatro|vier|quattro
five|cinq|cinco|fünf|cinque
fish|poisson|pescado|Fisch|pesce
apple|pomme|manzana|Apfel|mela
"""
