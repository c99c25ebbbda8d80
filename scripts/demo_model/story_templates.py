"""The sentence templates of the demo stories: plots as lists of steps, steps as lists of templates.

Owns only text. In a template ``(a|b|c)`` is a free choice (it may nest, and a branch may be
empty) and ``{slot}`` is filled from the scene. Choices always end at word borders, so that the
vocabulary of the grammar can be read off the templates. Every step says something different from
the others: a story therefore does not repeat itself. How templates are expanded and which slots
exist is `stories`' business.
"""

Step = tuple[str, ...]

OPENING: Step = (
    "Once upon a time(,|) there (was|lived) {a_trait} {animal} (called|named) {name}.",
    "(Long ago|Many years ago|Once), {a_trait} {animal} (called|named) {name} lived {place}.",
    "{hero} was (known as|) the most {trait} {animal} (far and wide|in the land|of all).",
    "There was once {a_trait} {animal} (whose name was|by the name of) {name}.",
    "This is (the|a) story (of|about) {name}, {a_trait} {animal} who lived {place}.",
    "(Not far from here|Far away), {place}, lived {name}, {a_trait} (young|) {animal}.",
    "(Everybody|Everyone) {place} knew {hero}, who was (very|so|rather|) {trait}.",
)

HABIT: Step = (
    "{He} (loved|liked) {hobby} (every morning|every day|all day long|after breakfast|).",
    "(Most of all|More than anything), {he} (loved|liked) {hobby}.",
    "(Every evening|Each night|On Sundays), {name} (used|went out) {hobby}.",
    "(Nothing|Hardly anything) made {him} happier than {treat}, and {he} (liked|loved) {hobby}.",
    "{His} (mother|father|grandmother|sister) often (taught|asked) {him} {hobby}.",
    "{He} (always|often) had {treat} for (breakfast|lunch|supper).",
    "(All the other animals|The neighbours) were fond of {him}.",
)

LOST_PROBLEM: Step = (
    "One {weather} (morning|day|afternoon), {name} (saw|noticed) that {his} {thing} was gone.",
    "(But one|One) day {name} (lost|could not find) {his} (dear|lovely|) {thing} {place}.",
    "One {weather} (evening|day), the {thing} that {name} (loved|owned) (was missing|disappeared).",
    "Then, on a {weather} (day|morning), {his} {thing} (fell|slipped) out of {his} bag {place}.",
    "{name} (went for a walk|walked around) {place} and (lost|dropped) {his} (new|old|) {thing}.",
)
LOST_TRY: Step = (
    "{He} (looked|searched) (everywhere|high and low|all over), but the {object} was not there.",
    "{He} (looked|peeked) under the bed, behind the door and in every (corner|drawer).",
    "For (an hour|a long time|hours) {he} (searched|looked around), (but|and still) found nothing.",
    '"Where (can|could) my {object} be?" {he} (cried|sighed|wondered).',
    "{He} sat down and (cried|began to cry|felt very sad).",
)
LOST_TALK: Step = (
    '"What (is wrong|happened), {name}?" (asked|said) {friend}, who (came|walked) by.',
    '{friend} (heard|saw) {him} and (asked|said), "(Can|May) I help you (look|search)?"',
    "(Soon|Just then|Luckily) {friend} (came along|passed by) and (offered|promised) to help.",
    '(Then|Soon) {he} met {friend}. "I (have lost|cannot find) my {object}," {he} said.',
    '"Do not (worry|cry)," said {friend}. "(Two|Four) eyes see more than (one|two)."',
)
LOST_RESOLVE: Step = (
    "(Together|Side by side) they (walked|went) {place2}, and there it was, {hideout}.",
    "They (followed|saw) some (tiny|small|) footprints and found the {object} {hideout} {place2}.",
    "{friend_name} (looked|searched) {place2} and (found|discovered) the {object} {hideout}.",
    "(After|In) a (little|short) while, {friend_name} (spotted|saw) something {colour} {hideout}.",
    '"(Look|See)!" (shouted|called) {friend_name}. The {object} (was|lay) {hideout}.',
    "At last {name} (found|saw) {his} {object}: a cheeky bird had (put|hidden) it {hideout}.",
)

WISH_PROBLEM: Step = (
    "(But|Yet) {he} (had|owned) no {object}, and {he} (wanted|wished for) one (so much|very much).",
    "One {weather} (day|morning), {name} saw a {thing} {place} and (wished|longed) to have one.",
    "What {he} (wanted|wished for) most was a (beautiful|shiny|small|) {thing}.",
    "{name} (dreamed|thought) of a {thing} (every night|all the time|day and night).",
    '"I wish I had a {thing}," {name} said (to the moon|one {weather} morning|one evening).',
)
WISH_TRY: Step = (
    "{He} (went|ran) to the shop, but (it was closed|there was none left).",
    "{He} (counted|saved) {his} coins, but (there were only three|they were not enough).",
    "{He} tried to make one (of|from) {material}, but it (broke|fell apart) (at once|quickly|).",
    "{He} (asked|begged) the (baker|miller|shopkeeper), but (nobody|no one) (had|sold) any.",
    "{He} (waited|hoped) for {his} birthday, but it was (months|still a long time) away.",
)
WISH_TALK: Step = (
    "(One|The next) day {he} told {friend} about {his} (wish|dream).",
    '"Why do you look so (sad|thoughtful)?" asked {friend}, (an old|a good) friend.',
    '{friend} (listened|smiled) and said, "I (have|know) (an idea|a plan)."',
    '"Come (to|and visit) me {place2} (tomorrow|tonight)," (said|whispered) {friend}.',
    "{friend} (heard|knew) about the wish and wanted to (help|surprise) {him}.",
)
WISH_RESOLVE: Step = (
    "They worked (all day|until sunset) with {material} and (made|built) a fine {thing}.",
    "{friend_name} (opened|looked into) an old (chest|cupboard) and took out a {thing}.",
    "They helped the farmer {place2}, and he gave them a {thing} as (thanks|a reward).",
    "{friend_name} (gave|handed) {him} a (small|big) (parcel|present), and inside was a {thing}.",
    "{place2_start} they (found|met) a (pedlar|wizard) who (traded|swapped) a {thing} for {treat}.",
)

STUCK_PROBLEM: Step = (
    "One {weather} (day|morning), {his} {thing} got stuck {trap}.",
    "(Suddenly|All at once) the wind (took|caught) {his} {thing}, and it landed {trap}.",
    "While {name} was playing {place}, {his} {thing} got (stuck|caught) {trap}.",
    "On a {weather} afternoon, {name} (tripped|slipped), and {his} {thing} ended up {trap}.",
    "A (naughty|rude) magpie (stole|grabbed) the {thing} of {name} and (dropped|left) it {trap}.",
)
STUCK_TRY: Step = (
    "{He} (jumped|pulled|pushed) as (hard|well) as {he} could, but it (did not move|was no use).",
    "{He} (threw|tossed) a (pebble|stick) at it, but (missed|nothing happened).",
    "{He} tried (again and again|three times|many times), but {he} was too (small|weak).",
    '"Oh (no|dear)! (What|Now what) (shall|can) I do?" {he} (cried|moaned).',
    "{He} (scratched|shook) {his} head and did not know (what to do|how to get it back).",
)
STUCK_TALK: Step = (
    "(Soon|After a while) {friend} (came|strolled) by with {tool}.",
    '"(Wait|Stop)!" (called|shouted) {friend}. "I (will|can) (fetch|bring) {tool}."',
    '{He} (ran|hurried) to {friend} and (said|called), "Please help me with {tool}!"',
    "{friend} lived (nearby|next door), heard the noise and (came|ran) out (at once|quickly).",
    '{friend} (laughed|smiled) and said, "(That|This) is (easy|no problem) with {tool}."',
)
STUCK_RESOLVE: Step = (
    "They (used|took) {tool} and (pulled|pushed) until the {object} was free.",
    "{friend_name} held {tool} while {name} (carefully|slowly) (reached|grabbed) the {object}.",
    '"One, two, three!" they (counted|called), and with a pop the {object} came (loose|down).',
    "{name} (climbed|stood) on the (back|shoulders) of {friend_name} and (got|took) it.",
    "(Working|Pulling) together, they (freed|saved) it (easily|in no time|at last).",
)

STORM_PROBLEM: Step = (
    "One day {name} went {place_to} with {his} {thing} when (a storm|heavy rain) (began|came up).",
    "On a {weather} (day|afternoon), dark clouds (came|rolled) over, and {name} was still {place}.",
    "{name} (walked|wandered) too far {place_from} and could not find the way (home|back).",
    "(One|A) {weather} evening, {name} was {place} with a {thing}, and (it got dark|night fell).",
    "(Suddenly|One night) there was (thunder|lightning), and {name} was all alone {place}.",
)
STORM_TRY: Step = (
    "The wind (blew|howled), the trees (shook|creaked), and {he} (shivered|trembled).",
    "{He} (hid|crouched) {hideout} and (waited|held {his} {object} tight).",
    "{He} (called|shouted) for help, but (only an echo|nobody|no one) answered.",
    '"I (want|wish) to go home," {he} (whispered|sobbed).',
    "{He} (was scared|felt lonely), and {his} (paws|feet|ears) were (cold|wet).",
)
STORM_TALK: Step = (
    "(Then|At last) {he} saw a (small|warm|) light: it was {friend} with a lamp.",
    '"Who is (there|crying)?" asked a (soft|deep) voice. It was {friend}.',
    "(Luckily|By chance) {friend} was (also|just) on the way home (and heard {him}|).",
    '{friend} opened the door and said, "(Come in|Step inside), you are (cold|wet)!"',
    '"(Take|Hold) my hand," said {friend}. "I know (the way|a safe place)."',
)
STORM_RESOLVE: Step = (
    "They (ran|hurried) to a (dry|cosy) hut {place2} and (lit|made) a fire.",
    "{friend_name} (brought|led) {him} {place2_to}, (where|and there) they ate {treat}.",
    "They (sang|told) (songs|stories) until the (storm|rain) was over and the (sun|moon) came out.",
    "{friend_name} used the {thing} to (show|mark) the (path|way), and soon they were (home|safe).",
    "They (wrapped|warmed) themselves in (blankets|wool) and (drank|shared) {treat}.",
)

GIFT_PROBLEM: Step = (
    "It was (almost|nearly) the birthday of {friend}, and {name} had no (gift|present).",
    "One {weather} (day|morning), {name} wanted to (give|make) {friend} a (gift|surprise).",
    "{friend} was (ill|sick), so {name} (wanted|decided) to bring {friend_him} a {thing}.",
    "{name} (learned|heard) that {friend} (had never owned|wanted) a {thing}.",
    '"{friend} is my best friend," {name} said. "I (will|must) find a {thing} for {friend_him}."',
)
GIFT_TRY: Step = (
    "{He} took (some|plenty of) {material} and (started|began) to (work|build) (at once|).",
    "{He} (walked|went) {place_to} to (buy|look for) the (best|right) one.",
    "{He} (worked|stayed up) (all night|until midnight), (cutting|gluing) and (painting|sewing).",
    "The first (one|try) was (crooked|too small), so {he} (tried|started) again.",
    "{He} (picked|chose) the (finest|nicest) {object} and (wrapped|packed) it in (paper|cloth).",
)
GIFT_TALK: Step = (
    "(Then|The next day) {he} (carried|took) the {thing} to the (house|door) of {friend_name}.",
    '"(Close|Shut) your eyes," said {name}, "and (hold out|open) your (paws|hands)!"',
    "{name} (knocked|rang) (twice|three times) and (hid|waited) {hideout}.",
    "{friend_name} was (sitting|resting) {place2} and did not expect (a guest|anyone).",
    '"(Surprise|Hooray)!" (called|shouted) {name} (loudly|with a grin|).',
)
GIFT_RESOLVE: Step = (
    '"A {thing}! (How|It is) (lovely|wonderful|beautiful)!" (cried|said) {friend_name}.',
    "{friend_name} (opened|unwrapped) it and (smiled|laughed) (from ear to ear|with joy).",
    "{friend_name} (tried|tested) the {object} at once, and it was (perfect|just right).",
    '"(Nobody|No one) ever gave me such a (nice|fine) {object}," said {friend_name}.',
    "{friend_name} (hugged|kissed) {him} and (invited {him} for|brought out) {treat}.",
)

BROKEN_PROBLEM: Step = (
    "(But one|One) {weather} (day|morning), {his} {thing} (broke|fell) and (cracked|was torn).",
    "{name} (tripped|stumbled) over a (root|stone) {place}, and {his} {thing} broke in two.",
    "One (day|evening), a (wild|heavy) cart (ran|rolled) over the {thing} of {name}.",
    "{name} (took|carried) {his} {thing} {place_to} and (dropped|broke) it by (mistake|accident).",
    "On a {weather} (day|morning), {name} found that the {thing} (did not work|was broken).",
)
BROKEN_TRY: Step = (
    "{He} tried to (fix|mend) it with {material}, but it (only got worse|would not hold).",
    "{He} (put|pressed) the (pieces|parts) together, but they (fell|came) apart again.",
    '"It is (ruined|all my fault)," {he} (said|sobbed) (sadly|with a sigh|).',
    "{He} (hid|kept) the (pieces|parts) in a drawer and (told nobody|said nothing).",
    "A (big|small|) tear (ran|rolled) down {his} (nose|cheek).",
)
BROKEN_TALK: Step = (
    '{friend} (saw|noticed) it and said, "(Everything|Most things) can be (mended|repaired)."',
    "{friend}, who was (good|skilled) (with tools|at such things), (came|stopped) by.",
    '"(Show|Give) it to me," said {friend}. "I (once|often) (fixed|repaired) one (myself|)."',
    "(In the end|Finally) {he} (went|walked) to {friend}, (who lived|the best mender) {place2}.",
    '"(Cheer|Chin) up," said {friend}. "We (need|only need) some {material}."',
)
BROKEN_RESOLVE: Step = (
    "They used {material} and {material2}, and (soon|by evening) the {object} was (whole|fine).",
    "{friend_name} (hammered|glued|sewed) while {name} (held|turned) the (pieces|parts).",
    "(Piece|Bit) by (piece|bit) they put the {thing} (back together|in order).",
    "It took (all day|two hours|a while), but in the end it (looked|was) better than before.",
    "They (painted|cleaned) the {object} (again|too), and it (shone|looked) like new.",
)

JOY: Step = (
    "{name} was so (happy|glad) that {he} (danced|jumped|hopped) around {friend_name}.",
    '"Thank you, {friend_name}!" (said|cried) {name}. "You are (a true friend|so kind|the best)."',
    "They (laughed|cheered) and (shared|ate) {treat} (together|under the stars|in the sun).",
    '"(Hooray|Hurrah)!" (they both|the two friends) (cried|sang), and {name} (clapped|bowed).',
    "{name} (hugged|thanked) {friend_name} and (gave|promised) {friend_him} {treat}.",
    '{friend_name} (winked|nodded) and said, "(That|This) is what (friends|neighbours) are for."',
)

ENDING: Step = (
    "(Later|After that) they (played|sat) {place2} until the (sun|stars) (went down|faded).",
    "From (that|this) day on, {name} and {friend_name} were (best|good|close) friends.",
    "That night {name} (slept|dreamed) (well|happily|like a log).",
    "(And so|So) {name} learned that (sharing|helping) makes (life|things) (better|easier).",
    "{name} never forgot (that day|what {friend_name} had done|how kind a friend can be).",
    "And they lived happily (ever after|for many years|to the end of their days).",
    "(When|Whenever) {name} looked at the {object}, {he} (smiled|thought of {friend_name}).",
    "(Ever since|Since then), the two (meet|have met) {place} (every week|every day|each spring).",
)

PLOTS: dict[str, tuple[Step, Step, Step, Step]] = {
    "lost": (LOST_PROBLEM, LOST_TRY, LOST_TALK, LOST_RESOLVE),
    "wish": (WISH_PROBLEM, WISH_TRY, WISH_TALK, WISH_RESOLVE),
    "stuck": (STUCK_PROBLEM, STUCK_TRY, STUCK_TALK, STUCK_RESOLVE),
    "storm": (STORM_PROBLEM, STORM_TRY, STORM_TALK, STORM_RESOLVE),
    "gift": (GIFT_PROBLEM, GIFT_TRY, GIFT_TALK, GIFT_RESOLVE),
    "broken": (BROKEN_PROBLEM, BROKEN_TRY, BROKEN_TALK, BROKEN_RESOLVE),
}
