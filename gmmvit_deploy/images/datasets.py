"""Normalisation and class names of known data sets, for the option ``--dataset``.

Tiny-ImageNet's classes are in the order of their WordNet IDs, which are the names of the folders that loaders sort; a
name is the first lemma of the synset.
"""

from __future__ import annotations

from dataclasses import dataclass

_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

_TINY_IMAGENET = """
goldfish; European fire salamander; bullfrog; tailed frog; American alligator; boa constrictor; trilobite;
scorpion; black widow; tarantula; centipede; goose; koala; jellyfish; brain coral; snail; slug; sea slug;
American lobster; spiny lobster; black stork; king penguin; albatross; dugong; Chihuahua; Yorkshire terrier;
golden retriever; Labrador retriever; German shepherd; standard poodle; tabby; Persian cat; Egyptian cat;
cougar; lion; brown bear; ladybug; fly; bee; grasshopper; walking stick; cockroach; mantis; dragonfly;
monarch; sulphur butterfly; sea cucumber; guinea pig; hog; ox; bison; bighorn; gazelle; Arabian camel;
orangutan; chimpanzee; baboon; African elephant; lesser panda; abacus; academic gown; altar; apron; backpack;
bannister; barbershop; barn; barrel; basketball; bathtub; beach wagon; beacon; beaker; beer bottle; bikini;
binoculars; birdhouse; bow tie; brass; broom; bucket; bullet train; butcher shop; candle; cannon; cardigan;
cash machine; CD player; chain; chest; Christmas stocking; cliff dwelling; computer keyboard; confectionery;
convertible; crane; dam; desk; dining table; drumstick; dumbbell; flagpole; fountain; freight car; frying pan;
fur coat; gasmask; go-kart; gondola; hourglass; iPod; jinrikisha; kimono; lampshade; lawn mower; lifeboat;
limousine; magnetic compass; maypole; military uniform; miniskirt; moving van; nail; neck brace; obelisk;
oboe; organ; parking meter; pay-phone; picket fence; pill bottle; plunger; pole; police van; poncho; pop
bottle; potter's wheel; projectile; punching bag; reel; refrigerator; remote control; rocking chair; rugby
ball; sandal; school bus; scoreboard; sewing machine; snorkel; sock; sombrero; space heater; spider web;
sports car; steel arch bridge; stopwatch; sunglasses; suspension bridge; swimming trunks; syringe; teapot;
teddy; thatch; torch; tractor; triumphal arch; trolleybus; turnstile; umbrella; vestment; viaduct; volleyball;
water jug; water tower; wok; wooden spoon; comic book; plate; guacamole; ice cream; ice lolly; pretzel; mashed
potato; cauliflower; bell pepper; mushroom; orange; lemon; banana; pomegranate; meat loaf; pizza; potpie;
espresso; alp; cliff; coral reef; lakeside; seashore; acorn
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Mean and std of training, for pixel values scaled to [0, 1], and class names in the order of the class index."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: tuple[str, ...]


DATASETS: dict[str, Dataset] = {
    "cifar10": Dataset(
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        labels=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "cifar100": Dataset(mean=(0.5070, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762), labels=tuple(_CIFAR100.split())),
    "svhn": Dataset(mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970), labels=tuple("0123456789")),
    "tiny-imagenet": Dataset(
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        labels=tuple(name.strip() for name in _TINY_IMAGENET.replace("\n", " ").split(";")),
    ),
    # MNIST's images are grey. Common tutorials train on values in [0, 1] without further normalisation.
    "mnist": Dataset(mean=(0.0,), std=(1.0,), labels=tuple("0123456789")),
    # scikit-learn's handwritten digits: mean and std over all 1,797 images, with grey values 0..16 scaled to [0, 1]
    "digits": Dataset(mean=(0.3053, 0.3053, 0.3053), std=(0.3760, 0.3760, 0.3760), labels=tuple("0123456789")),
}
