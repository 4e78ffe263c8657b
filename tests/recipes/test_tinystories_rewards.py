from recipes.tinystories.rewards import HAPPY_WORDS, happy_sentence_reward

STORY = "Tim was very happy. He gave his mom a big hug. They laughed all day. He made a new friend."


def test_happy_sentences_are_counted(subtests):
    for completion, score in [
        (STORY, 1.0),
        (STORY + " It was so much fun.", 1.0),  # four are enough
        ("Tim was very happy. Then he went to his bed.", 0.25),
        ("Tim saw a big tree. It was old.", 0.0),
        ("", 0.0),
        ("Tim was very happy", 0.0),  # the sentence does not end
        ('"I love you so much!" she said.', 0.25),
    ]:
        with subtests.test(completion=completion):
            assert happy_sentence_reward(completions=[completion], prompts=["Tim"]) == [score]


def test_gaming_scores_no_more_than_one_sentence(subtests):
    for gamed in [
        "Happy happy happy happy. " * 8,
        "He was very happy. " * 8,
        "He was happy happily. She was so happy. They were all happy.",  # one word, inflected
        "Happy. Smile. Laugh. Love. Hug. Friend. Fun. Proud.",  # no sentences
        "happy smile laugh love hug thank friend fun proud glad.",  # one sentence
        " ".join(HAPPY_WORDS) + ".",  # one endless sentence
    ]:
        with subtests.test(gamed=gamed):
            assert happy_sentence_reward(completions=[gamed])[0] <= 0.25
