"""One draft of several: each row's from the one that drafted for it."""

import torch
import torch.nn.functional as F

from layerskip.draft import Draft, merged

VOCAB = 7


def drawn(tokens, num_drafted, **fields) -> Draft:
    """A draft with distributions of its own."""
    probs = torch.rand(len(tokens), len(tokens[0]), VOCAB, generator=torch.Generator().manual_seed(0)).softmax(-1)
    return Draft(torch.tensor(tokens), num_drafted, probs, **fields)


def test_one_alone_is_handed_on_as_it_is():
    """With the states that verification need not compute again."""
    draft = drawn([[1, 2]], [2], exact_states=torch.ones(1, 2, 4), exact_blocks=3)
    assert merged([draft], VOCAB) is draft


def test_rows_come_from_the_one_that_drafted_for_them():
    """Of different widths; the rest is padding. Catches what a drafter left in rows that were not its own."""
    long = Draft(torch.tensor([[9, 9, 9], [1, 2, 3], [9, 9, 9]]), [0, 3, 0])
    short = Draft(torch.tensor([[4], [8], [8]]), [1, 0, 0])
    for order in ([long, short], [short, long]):
        draft = merged(order, VOCAB)
        assert draft.num_drafted == [1, 3, 0]
        assert (draft.tokens[0, 0].item(), draft.tokens[1].tolist()) == (4, [1, 2, 3])
        assert draft.tokens.shape == (3, 3) and draft.probs is None


def test_a_chosen_draft_beside_a_drawn_one_is_certain():
    """Both are tested by one rule. Catches a copied token that is taken for drawn, or the reverse."""
    copied, own = Draft(torch.tensor([[1, 5, 2], [0, 0, 0]]), [3, 0]), drawn([[6, 6], [3, 4]], [0, 2])
    draft = merged([own, copied], VOCAB)
    assert torch.equal(draft.probs[0], F.one_hot(torch.tensor([1, 5, 2]), VOCAB).float())
    assert torch.equal(draft.probs[1, :2], own.probs[1])
    assert draft.probs.dtype == own.probs.dtype


def test_states_are_of_one_draft_alone():
    """Those of a row that was copied belong to other tokens: everything is computed again."""
    own = drawn([[6, 6], [3, 4]], [0, 2], exact_states=torch.ones(2, 2, 4), exact_blocks=3)
    draft = merged([own, Draft(torch.tensor([[1], [0]]), [1, 0])], VOCAB)
    assert (draft.exact_states, draft.exact_blocks) == (None, 0)
