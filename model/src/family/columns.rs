//! The columns in which model families differ.

/// The source of a flag.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Flag {
    Never,
    Always,
    /// A key of `config.json`; false if absent.
    Key(&'static str),
}

/// The source of a factor.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Factor {
    One,
    /// A key of `config.json`.
    Key(&'static str),
    /// The inverse of a key's value.
    InverseKey(&'static str),
    /// The inverse of the square root of a key's value.
    InverseRootKey(&'static str),
    RootOfHidden,
}

/// The layers that attend to a sliding window, of `sliding_window` tokens if that is set.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum WindowRule {
    Never,
    Everywhere,
    /// If `use_sliding_window`: the layers that `layer_types` names, or else those from `max_window_layers` on.
    IfUsed,
    /// The layers that `layer_types` names, or else all but every n-th: `sliding_window_pattern`, or this.
    AllBut(usize),
}

/// The layers that rotate queries and keys, and their rotation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum RopeRule {
    Everywhere,
    /// All layers rotate, with positions on several axes (`mrope_section`): text has the same position on all of them, so this is the usual
    /// rotation.
    Axes,
    /// Layers with a window have settings of their own: those under `sliding_attention`, or else unscaled ones with the base in this key.
    ByWindow {
        local_theta: &'static str,
    },
    /// Only layers with a window, where the model has windows.
    Windowed,
    /// Not the layers with a 0 in `no_rope_layers`, or else not every `no_rope_layer_interval`-th.
    ExceptListed,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum NormKind {
    /// Root mean square.
    Rms,
    /// Root mean square, with factors that are the stored weights plus 1.
    RmsPlusOne,
    /// LayerNorm: the mean is subtracted first.
    Layer { has_bias: bool },
}

/// The names of a layer's norms, where it has them: before a part of the layer, over its input, and after it, over its output before this
/// is added to the residual stream.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct NormNames {
    pub(crate) before_attention: Option<&'static str>,
    pub(crate) after_attention: Option<&'static str>,
    pub(crate) before_mlp: Option<&'static str>,
    pub(crate) after_mlp: Option<&'static str>,
}

/// A norm over queries and keys, before the rotation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum QkNorm {
    None,
    /// Over each head separately.
    Heads,
    /// Over each head separately, if this key is true.
    HeadsIf(&'static str),
    /// Over all heads together.
    All,
}

/// The feed-forward layer's projections.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Mlp {
    /// The names of a gate, the projection that it multiplies, and the projection of the product.
    Gated([&'static str; 3]),
    /// `gate_up_proj`, the gate's outputs first, and `down_proj`.
    FusedGate,
    /// `c_fc`, `c_proj`, without a gate.
    Plain,
}

/// The function from a router's logits to scores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scores {
    /// A softmax over the logits of all experts.
    Softmax,
    /// A softmax over the logits of a row's experts, which are those with the largest.
    ChosenSoftmax,
    /// The sigmoid of each logit.
    Sigmoid,
}

/// An expert that every row goes through.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct SharedExpert {
    /// The prefix of its projections in the block.
    pub(crate) name: &'static str,
    pub(crate) width: SharedWidth,
    /// The projection to one number, whose sigmoid is the expert's weight; the weight is 1 if `None`.
    pub(crate) gate: Option<&'static str>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum SharedWidth {
    Key(&'static str),
    /// The key of a multiple of a routed expert's width.
    TimesKey(&'static str),
}

/// Groups of experts; a row's experts come from the best few of them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct GroupRule {
    /// The keys of the number of groups, and of the number that a row's experts come from.
    pub(crate) keys: [&'static str; 2],
    pub(crate) rank: GroupRank,
    /// The value of `topk_method` for groups.
    pub(crate) method: &'static str,
    /// The value of `topk_method` for a choice without groups, if there is such a model.
    pub(crate) without: Option<&'static str>,
}

/// The number by which groups of experts are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GroupRank {
    /// The sum of the group's two best scores.
    TwoBest,
    /// The group's best score.
    Best,
}

/// The storage of a layer's experts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum ExpertStorage {
    /// The names of the gate, up and down projections, which each expert has separately.
    Apart([&'static str; 3]),
    /// Two tensors with the projections of all experts, each expert's outputs first: `gate_up_proj` `[experts, 2 width, hidden]`, the gate's
    /// outputs before the others, and `down_proj` `[experts, hidden, width]`. Where they are absent, each expert has its own, by the usual
    /// names.
    StackedRows,
    /// Two tensors with the projections of all experts, as [`stacked`](crate::stacked) describes them.
    Stacked,
}

/// Feed-forward layers of experts, of which a router chooses some for each row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct ExpertRule {
    /// The two keys of the number of experts, of which a file has one.
    pub(crate) count: [&'static str; 2],
    /// The key of the number of experts per row.
    pub(crate) chosen: &'static str,
    pub(crate) intermediate: &'static str,
    pub(crate) scores: Scores,
    /// The vector in the block that is added to scores for the choice alone.
    pub(crate) correction: Option<&'static str>,
    pub(crate) groups: Option<GroupRule>,
    /// Whether the chosen experts' scores are scaled to sum to 1.
    pub(crate) is_normalized: Flag,
    /// The factor of the chosen experts' scores, or of their shares.
    pub(crate) factor: Factor,
    pub(crate) shared: Option<SharedExpert>,
    /// The prefix of the router and the experts in a layer.
    pub(crate) block: &'static str,
    pub(crate) router: &'static str,
    pub(crate) storage: ExpertStorage,
    /// Whether the router and the experts have biases.
    pub(crate) has_biases: bool,
}

/// Layers that keep a state where others keep keys and values.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Recurrence {
    /// Gated short convolutions: the layers that `layer_types` calls `conv`, or else all that `full_attn_idxs` does not list.
    ShortConv,
    /// Linear attention by a gated delta rule: the layers that `layer_types` calls `linear_attention`, or else all but every n-th
    /// (`full_attention_interval`).
    DeltaRule(DeltaStorage),
}

/// The storage of the input's projections of a gated delta rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DeltaStorage {
    /// Two tensors, `in_proj_qkvz` and `in_proj_ba`, have their outputs grouped by key head: its query, key, and its value heads' values and
    /// gates; its value heads' numbers for rates, and for decays.
    ByKeyHead,
    /// Four tensors, `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`, have their outputs head by head.
    Apart,
}

/// The width of a dense feed-forward layer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum WidthRule {
    /// `intermediate_size`
    AsStored,
    /// Two thirds of it times `block_ffn_dim_multiplier`, rounded up to a multiple of `block_multiple_of`, if
    /// `block_auto_adjust_ff_dim`.
    TwoThirds,
}

#[derive(PartialEq, Debug)]
pub(crate) struct Family {
    /// The name in `architectures` of `config.json`.
    pub(crate) architecture: &'static str,
    /// The `model_type` of a text model's configuration within a multimodal one.
    pub(crate) model_type: &'static str,
    /// The values of keys that `config.json` lacks, as in transformers' configuration classes.
    pub(crate) defaults: &'static str,
    /// Keys of older files, each with the one whose value it replaces.
    pub(crate) older_keys: &'static [(&'static str, &'static str)],
    pub(crate) norm: NormKind,
    pub(crate) norm_epsilon: &'static str,
    pub(crate) norms: NormNames,
    /// The name of the norm after the last layer.
    pub(crate) final_norm: &'static str,
    /// Whether the attention and the feed-forward layer both read the layer's input.
    pub(crate) is_parallel: bool,
    /// Whether the query, key and value projections are one, `qkv_proj`.
    pub(crate) has_fused_qkv: bool,
    /// The flag of biases in the query, key and value projections.
    pub(crate) qkv_bias: Flag,
    /// Whether the query projection has, for each head, the query's numbers and then as many gates of the head's output.
    pub(crate) has_output_gate: bool,
    /// The name of the attention's output projection.
    pub(crate) output: &'static str,
    /// The flag of a bias in the attention's output projection.
    pub(crate) output_bias: Flag,
    pub(crate) qk_norm: QkNorm,
    /// The names of the norms over queries and keys.
    pub(crate) qk_norm_names: [&'static str; 2],
    /// Whether keys and values are made from a latent.
    pub(crate) has_latent: bool,
    /// The layers that keep a state; `None` if all layers attend.
    pub(crate) recurrence: Option<Recurrence>,
    pub(crate) window: WindowRule,
    pub(crate) rope: RopeRule,
    /// Whether neighbouring numbers of a head rotate together, instead of those half a head apart.
    pub(crate) is_interleaved: bool,
    /// The factor of scores; `1 / sqrt(head_dim)` for `One`.
    pub(crate) score_factor: Factor,
    /// The key of the scores' soft cap.
    pub(crate) score_cap: Option<&'static str>,
    /// Whether a logit for each query head joins the softmax's sum.
    pub(crate) has_sinks: bool,
    /// Whether queries grow with their position by `llama_4_scaling_beta`.
    pub(crate) has_query_growth: bool,
    pub(crate) mlp: Mlp,
    pub(crate) mlp_width: WidthRule,
    /// The experts; `None` if all feed-forward layers are dense.
    pub(crate) experts: Option<ExpertRule>,
    /// The flag of biases in the feed-forward projections.
    pub(crate) mlp_bias: Flag,
    /// The key of the feed-forward layer's activation.
    pub(crate) activation: &'static str,
    /// The keys of the factor within a gate's sigmoid, and of the limit of the gate and of the numbers that it gates.
    pub(crate) gate_clamp: Option<[&'static str; 2]>,
    pub(crate) embedding_factor: Factor,
    /// The factor of the outputs that a layer's parts add to the residual stream.
    pub(crate) residual_factor: Factor,
    pub(crate) logit_factor: Factor,
    /// The key of the logits' soft cap.
    pub(crate) logit_cap: Option<&'static str>,
}
