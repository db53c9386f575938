"""The sizes that the table of families reads from a config are those of the model that is built from it."""

from layerskip.models.families import geometry_of


def test_geometry_is_that_of_the_modules(family_model):
    geometry = geometry_of(family_model.config)
    base = family_model.model
    attention = base.layers[0].self_attn
    assert geometry.num_layers == len(base.layers)
    assert (geometry.vocab_size, geometry.hidden_size) == tuple(base.embed_tokens.weight.shape)
    assert geometry.num_heads * geometry.head_dim == attention.q_proj.out_features
    assert geometry.kv_heads * geometry.head_dim == attention.k_proj.out_features
    assert geometry.head_dim == attention.head_dim
    assert geometry.group == attention.num_key_value_groups
    assert geometry.max_positions == family_model.config.max_position_embeddings
