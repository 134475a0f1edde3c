//! The differences between families of encoders, one row each.

/// The names of a family's tensors, and how they are used.
#[derive(PartialEq, Debug)]
pub(crate) struct EncoderFamily {
    /// The prefix of the architectures `…Model`, `…ForMaskedLM` and `…ForSequenceClassification`.
    pub(crate) name: &'static str,
    /// The prefix of the encoder's tensors in a checkpoint that also has a head.
    pub(crate) prefix: &'static str,
    pub(crate) words: &'static str,
    /// The table of token types: for the first text of a pair, and for the second.
    pub(crate) types: Option<&'static str>,
    pub(crate) positions: Positions,
    pub(crate) embedding_norm: &'static str,
    /// The prefix of the layers' tensors, before the layer's number.
    pub(crate) layers: &'static str,
    pub(crate) qkv: Qkv,
    pub(crate) output: &'static str,
    pub(crate) mlp: EncoderMlp,
    pub(crate) norm_order: NormOrder,
    pub(crate) attention_norm: &'static str,
    pub(crate) mlp_norm: &'static str,
    pub(crate) final_norm: Option<&'static str>,
    pub(crate) biases: Biases,
    pub(crate) head: Option<HeadNames>,
}

/// The encoding of positions.
#[derive(PartialEq, Debug)]
pub(crate) enum Positions {
    /// A learned table.
    Table {
        name: &'static str,
        /// Whether the first rows, up to that of the padding's id, stand for no position.
        after_padding: bool,
    },
    /// The rotation of queries and keys.
    Rotary,
    /// A rotation with a base and a window of their own in the layers that do not attend to everything.
    RotaryByWindow,
}

#[derive(PartialEq, Debug)]
pub(crate) enum Qkv {
    Apart([&'static str; 3]),
    Fused(&'static str),
}

/// The feed-forward layer's projections.
#[derive(PartialEq, Debug)]
pub(crate) enum EncoderMlp {
    Plain {
        up: &'static str,
        down: &'static str,
    },
    Gated {
        gate: &'static str,
        up: &'static str,
        down: &'static str,
    },
    /// A fused projection with the gate's outputs first.
    FusedGate {
        gate_up: &'static str,
        down: &'static str,
    },
}

/// The place of a layer's norms.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum NormOrder {
    /// Over the sum of a part's input and its output.
    After,
    /// Over a part's input; the first layer's attention reads the embedding's norm as it is.
    Before,
}

/// The projections and norms that have biases.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Biases {
    Everywhere,
    InNorms,
    /// According to `attention_bias`, `mlp_bias` and `norm_bias`.
    ByKeys,
}

/// The head of a classifier: a projection of the pooled row, a function, and a projection to a number per label.
#[derive(PartialEq, Debug)]
pub(crate) struct HeadNames {
    pub(crate) dense: &'static str,
    /// Whether the first projection lies under the encoder's prefix.
    pub(crate) dense_is_the_encoders: bool,
    pub(crate) function: HeadFunction,
    pub(crate) norm: Option<&'static str>,
    pub(crate) classifier: &'static str,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum HeadFunction {
    Tanh,
    /// The function in `classifier_activation`, without a bias in the first projection unless `classifier_bias` is set.
    ByKey,
}

const BERT: EncoderFamily = EncoderFamily {
    name: "Bert",
    prefix: "bert.",
    words: "embeddings.word_embeddings",
    types: Some("embeddings.token_type_embeddings"),
    positions: Positions::Table { name: "embeddings.position_embeddings", after_padding: false },
    embedding_norm: "embeddings.LayerNorm",
    layers: "encoder.layer",
    qkv: Qkv::Apart(["attention.self.query", "attention.self.key", "attention.self.value"]),
    output: "attention.output.dense",
    mlp: EncoderMlp::Plain { up: "intermediate.dense", down: "output.dense" },
    norm_order: NormOrder::After,
    attention_norm: "attention.output.LayerNorm",
    mlp_norm: "output.LayerNorm",
    final_norm: None,
    biases: Biases::Everywhere,
    head: Some(HeadNames {
        dense: "pooler.dense",
        dense_is_the_encoders: true,
        function: HeadFunction::Tanh,
        norm: None,
        classifier: "classifier",
    }),
};

const ROBERTA: EncoderFamily = EncoderFamily {
    name: "Roberta",
    prefix: "roberta.",
    positions: Positions::Table { name: "embeddings.position_embeddings", after_padding: true },
    head: Some(HeadNames {
        dense: "classifier.dense",
        dense_is_the_encoders: false,
        function: HeadFunction::Tanh,
        norm: None,
        classifier: "classifier.out_proj",
    }),
    ..BERT
};

pub(crate) const ENCODERS: &[EncoderFamily] = &[
    BERT,
    ROBERTA,
    EncoderFamily { name: "XLMRoberta", ..ROBERTA },
    EncoderFamily { name: "Camembert", ..ROBERTA },
    EncoderFamily {
        name: "ModernBert",
        prefix: "model.",
        words: "embeddings.tok_embeddings",
        types: None,
        positions: Positions::RotaryByWindow,
        embedding_norm: "embeddings.norm",
        layers: "layers",
        qkv: Qkv::Fused("attn.Wqkv"),
        output: "attn.Wo",
        mlp: EncoderMlp::FusedGate { gate_up: "mlp.Wi", down: "mlp.Wo" },
        norm_order: NormOrder::Before,
        attention_norm: "attn_norm",
        mlp_norm: "mlp_norm",
        final_norm: Some("final_norm"),
        biases: Biases::ByKeys,
        head: Some(HeadNames {
            dense: "head.dense",
            dense_is_the_encoders: false,
            function: HeadFunction::ByKey,
            norm: Some("head.norm"),
            classifier: "classifier",
        }),
    },
    EncoderFamily {
        name: "NomicBert",
        prefix: "",
        positions: Positions::Rotary,
        embedding_norm: "emb_ln",
        layers: "encoder.layers",
        qkv: Qkv::Fused("attn.Wqkv"),
        output: "attn.out_proj",
        mlp: EncoderMlp::Gated { gate: "mlp.fc12", up: "mlp.fc11", down: "mlp.fc2" },
        attention_norm: "norm1",
        mlp_norm: "norm2",
        biases: Biases::InNorms,
        head: None,
        ..BERT
    },
];
