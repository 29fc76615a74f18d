"""The document that the demo asks about: 2,000 tokens of plain prose, written for kvd.

It is code and not a data file so that no packaging can lose it.
"""

from __future__ import annotations

from typing import Final

QUESTION: Final = "When was the light at Skerra Point lit for the first time?"

DOCUMENT: Final = """\
The light at Skerra Point

The lighthouse at Skerra Point was lit for the first time on the second of October 1871. It stands
on a shelf of black rock two miles from the harbour of Aldness, and for most of the year the only
way to reach it is a boat that leaves on the morning tide and comes back on the evening one. The
tower is thirty-one metres high. Its walls are two metres thick at the foot and half a metre at
the gallery, and every stone in it was cut on the mainland, numbered, laid out in a field to see
that it fitted, taken apart again, and carried across the water in the order in which it was
needed.

Three keepers lived in the tower at any time. Each stayed for six weeks and then had two weeks
ashore, so that a fourth man was always on leave. The head keeper answered for the lamp and the
books, the first assistant for the engine that turned the lens, and the second assistant for
everything else, which meant the cooking, the coal, the boat and the fog bell. They shared the
night in watches of four hours. Whoever had the watch was not allowed to sit in a chair with arms,
because the Board had found that a man can sleep in a chair with arms.

The lamp burned paraffin. Around it turned a lens of the first order, nearly two metres across,
that floated in a bath of mercury and weighed almost three tonnes. It was driven by a weight on a
chain, like a tall clock, and the weight took fifty minutes to come down through the middle of the
tower. Somebody had to wind it up again before it touched the floor. In a winter night of sixteen
hours that made nineteen windings, and the men kept count with dried beans in two saucers, moving
one bean across each time, since it is easy at four in the morning to remember a winding that
happened an hour before it did.

The light showed two white flashes and then a dark space, once in every thirty seconds. No other
light on that coast did the same, and this mattered more than how far it could be seen. A captain
who sees a light he cannot name knows only that there is land near, which he knew already. A
captain who counts two flashes and thirty seconds knows where he is. The keepers therefore worried
less about a lamp that burned a little low than about a lens that turned a little slow, and twice
in each watch they timed a full turn against the tower's clock, and wrote the figure down.

They wrote everything down, and they wrote it twice. The first book, which was called the wet
book, lay open on a shelf beside the lamp. In it went each event at the moment it happened: the
lamp lit, the wind and the glass, a ship seen, a winding late, a pane cracked by a bird. It was
kept in pencil, because ink runs when it gets wet. The second book, the fair book, was kept in the
room below. Every morning the head keeper copied into it, in ink, what the wet book said of the
night, left out what did not matter, and signed it. The fair book was what the Board's inspector
read, and it was on the fair book that a man's good name depended.

A new assistant once asked why the same thing had to be written two times, when paper was dear and
the mornings were cold. The head keeper of those years, whose name was Marten Hale, gave him an
answer that the others liked well enough to hand on. The wet book, he said, is quick, and it is
where your hand is, but one wave through the gallery door and it is pulp. The fair book is slow,
and it is down a flight of stairs, but it is dry. If we only had the fair book we should write
less, because nobody runs down thirty steps to note a gull. If we only had the wet book we should
one day have nothing. So we write where it is quick and we keep where it is safe, and we do not
call a thing kept until it is in the second book, whatever we may have scribbled in the first.

He had three rules to go with it, and they were painted on the wall above the shelf. The first was
that no page of the wet book was to be torn out before its night had been copied and signed. The
second was that a line copied wrongly was to be struck out and never scraped away, so that anybody
could see there had been a mistake. The third was the one the assistants found hardest. If the wet
book could not be read, the fair book was to say so. A keeper was not to fill the gap with what he
thought had probably happened. An empty line, said Hale, costs us a question from the inspector; a
wrong line may cost somebody a ship.

The third rule was tested in the winter of 1894. On the night of the eleventh of January a sea
came over the gallery, broke four panes on the weather side, put out the lamp and took the wet
book with it. The first assistant, Tobias Renn, had the lamp burning again in seven minutes. He
had timed them by counting aloud while he worked. In the morning Hale wrote in the fair book that
the light had been out for about seven minutes at about a quarter past two, and that everything
between midnight and that time was lost. Eight days later a letter came from the owners of the
barque Heron, which had gone aground four miles to the north on the same night. Her master swore
that he had looked for the light at half past one and that it had not been there.

The inquiry sat for two days in the town hall at Aldness. A keeper who wanted to look well would
have written that the light burned steadily until a quarter past two, and most likely that would
have been true. But the page said only that the hours were lost, and Hale said the same when he
was asked. The Heron's owners thought that they had won. Then the harbour master brought his own
book, in which a boy had been told to write down every quarter of an hour whether the light at
Skerra could be seen from the pier. It had been seen at half past one, and at a quarter to two,
and at two. At a quarter past two it had not. The court found that the light had been kept
properly, and its president remarked that he believed the harbour's book about those hours exactly
because the tower's book made no claim about them.

Renn, who had been seven minutes in the dark with the broken glass, was asked at the same inquiry
how he could be so sure of his seven. He said that he had counted four hundred and twenty, and
that he had done it aloud because a man who counts silently starts to hope. He was given a silver
watch by the insurers, and it is said that he never wound it. What he kept all his life instead
was a bean, which he had found in his pocket when it was over: he had taken it out of the saucer
to move it, just as the sea came in, and so the winding of half past two was the only one in the
station's history that was counted in neither saucer. Hale made him put it in the fair book.

After this the Board changed its practice along the whole coast. Each station was to have a second
place, away from its own walls, where its light was watched and the watching written down, and
once a month the two books were to be laid side by side. Where they agreed, nothing was done.
Where they did not, neither was taken to be right until a reason had been found. In the first year
this turned up eleven clocks that were wrong, two keepers who were asleep, and one pier from
which, it turned out, the light could not be seen at all when the herring boats had their sails up
to dry.

The engine was replaced by an electric motor in 1931, and the paraffin by a bulb no larger than a
pear. The lens stayed, because nobody has ever made a better one. The last keepers left in 1978.
They locked the door, although there was no one to lock it against, and took both books with them
on the evening tide. The wet book of that last night is in the museum at Aldness. Its final entry
is in pencil, a little smeared, in the hand of the second assistant. It gives the time, the wind
and the height of the glass, and says that the light is burning. Under it, in ink, somebody has
written the word copied, and a name.

Visitors often ask to see the room where the beans were kept. The two saucers are still there, on
the shelf beside the place where the wet book used to lie, under the three rules in their black
paint. The guide lets children move a bean from one saucer to the other, and asks them afterwards
how many there are. They hardly ever agree on the number, and she tells them that this is why
there were two books, and why, if they ever have anything to keep that they would be sorry to
lose, they should do the same.
"""
