//! The encoder: any BERT, its [CLS] vector to one number. The structs are the checkpoint's tensor names, read from left to right.
//!
//! Made of operations that have a gradient: candle's own layer norm and fused softmax have none and cut the graph without a word. This is the reference
//! for every other path, and what serves and trains on a GPU.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{Embedding, Linear, Module, VarBuilder};
use serde::{Deserialize, Serialize};

use super::tokenizer::Pieces;
use super::weights::RankerError;

/// What a checkpoint's `config.json` says, as far as it changes the arithmetic of inference. Other fields are kept out of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub intermediate_size: usize,
    #[serde(default)]
    pub hidden_act: Activation,
    pub max_position_embeddings: usize,
    #[serde(default = "two")]
    pub type_vocab_size: usize,
    #[serde(default = "epsilon")]
    pub layer_norm_eps: f64,
    #[serde(default)]
    pub position_embedding_type: Positions,
    #[serde(default = "bert")]
    pub model_type: String,
}

/// The nonlinearity between the two halves of a layer's feed-forward block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    #[default]
    Gelu,
    #[serde(alias = "gelu_pytorch_tanh")]
    GeluNew,
    Relu,
    Silu,
}

/// How positions enter. BERT's relative variants are not supported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    #[default]
    Absolute,
}

fn two() -> usize {
    2
}

fn epsilon() -> f64 {
    1e-12
}

fn bert() -> String {
    "bert".into()
}

impl Config {
    /// Reads a `config.json` and checks that its numbers fit together.
    ///
    /// # Errors
    /// [`RankerError::Config`] says which do not.
    pub fn from_json(json: &[u8]) -> std::result::Result<Config, RankerError> {
        let config: Config = serde_json::from_slice(json).map_err(|error| RankerError::Config(error.to_string()))?;
        let sizes = [
            config.vocab_size,
            config.hidden_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.intermediate_size,
            config.max_position_embeddings,
            config.type_vocab_size,
        ];
        let reason = if config.model_type != "bert" {
            format!("model_type is {:?}, not \"bert\"", config.model_type)
        } else if sizes.contains(&0) {
            "a size is zero".into()
        } else if !config.hidden_size.is_multiple_of(config.num_attention_heads) {
            format!("hidden_size {} is not a multiple of num_attention_heads {}", config.hidden_size, config.num_attention_heads)
        } else if !(config.layer_norm_eps > 0.0 && config.layer_norm_eps < 1.0) {
            format!("layer_norm_eps is {}", config.layer_norm_eps)
        } else {
            return Ok(config);
        };
        Err(RankerError::Config(reason))
    }
}

/// Layer norm over the last dimension, as a composition.
struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    epsilon: f64,
}

impl LayerNorm {
    fn new(size: usize, epsilon: f64, vb: VarBuilder) -> Result<LayerNorm> {
        Ok(LayerNorm { weight: vb.get(size, "weight")?, bias: vb.get(size, "bias")?, epsilon })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let deviation = (centred.sqr()?.mean_keepdim(D::Minus1)? + self.epsilon)?.sqrt()?;
        centred.broadcast_div(&deviation)?.broadcast_mul(&self.weight)?.broadcast_add(&self.bias)
    }
}

/// Softmax over the last dimension, as a composition.
fn softmax(x: &Tensor) -> Result<Tensor> {
    let x = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    x.broadcast_div(&x.sum_keepdim(D::Minus1)?)
}

fn linear(input: usize, output: usize, vb: VarBuilder) -> Result<Linear> {
    Ok(Linear::new(vb.get((output, input), "weight")?, Some(vb.get(output, "bias")?)))
}

#[expect(non_snake_case, reason = "the checkpoint's own name")]
struct Embeddings {
    word_embeddings: Embedding,
    position_embeddings: Embedding,
    token_type_embeddings: Embedding,
    LayerNorm: LayerNorm,
}

impl Embeddings {
    fn new(config: &Config, vb: VarBuilder) -> Result<Embeddings> {
        let table =
            |rows, name| Ok::<_, candle_core::Error>(Embedding::new(vb.pp(name).get((rows, config.hidden_size), "weight")?, config.hidden_size));
        Ok(Embeddings {
            word_embeddings: table(config.vocab_size, "word_embeddings")?,
            position_embeddings: table(config.max_position_embeddings, "position_embeddings")?,
            token_type_embeddings: table(config.type_vocab_size, "token_type_embeddings")?,
            LayerNorm: LayerNorm::new(config.hidden_size, config.layer_norm_eps, vb.pp("LayerNorm"))?,
        })
    }

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let (_, length) = ids.dims2()?;
        let words = self.word_embeddings.forward(ids)?;
        let positions = self.position_embeddings.forward(&Tensor::arange(0, length as u32, ids.device())?)?;
        // One segment throughout: its embedding is the table's first row.
        let segment = self.token_type_embeddings.forward(&Tensor::zeros(length, DType::U32, ids.device())?)?;
        self.LayerNorm.forward(&words.broadcast_add(&(positions + segment)?)?)
    }
}

struct SelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    heads: usize,
}

impl SelfAttention {
    fn new(config: &Config, vb: VarBuilder) -> Result<SelfAttention> {
        let part = |name| linear(config.hidden_size, config.hidden_size, vb.pp(name));
        Ok(SelfAttention { query: part("query")?, key: part("key")?, value: part("value")?, heads: config.num_attention_heads })
    }

    /// What the places `of` see of all places `x`.
    fn forward(&self, of: &Tensor, x: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let (batch, _, hidden) = x.dims3()?;
        let size = hidden / self.heads;
        let split = |x: Tensor| x.reshape((batch, (), self.heads, size))?.transpose(1, 2)?.contiguous();
        let (query, key, value) = (split(self.query.forward(of)?)?, split(self.key.forward(x)?)?, split(self.value.forward(x)?)?);
        let mut weights = (query.matmul(&key.t()?)? * (1.0 / (size as f64).sqrt()))?;
        if let Some(mask) = mask {
            weights = weights.broadcast_add(mask)?;
        }
        softmax(&weights)?.matmul(&value)?.transpose(1, 2)?.reshape((batch, (), hidden))
    }
}

/// A projection, the residual and a layer norm: the end of both halves of a layer.
#[expect(non_snake_case, reason = "the checkpoint's own name")]
struct Output {
    dense: Linear,
    LayerNorm: LayerNorm,
}

impl Output {
    fn new(input: usize, config: &Config, vb: VarBuilder) -> Result<Output> {
        Ok(Output {
            dense: linear(input, config.hidden_size, vb.pp("dense"))?,
            LayerNorm: LayerNorm::new(config.hidden_size, config.layer_norm_eps, vb.pp("LayerNorm"))?,
        })
    }

    fn forward(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.LayerNorm.forward(&(self.dense.forward(x)? + residual)?)
    }
}

struct Attention {
    self_: SelfAttention,
    output: Output,
}

struct Intermediate {
    dense: Linear,
    activation: Activation,
}

impl Intermediate {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.dense.forward(x)?;
        match self.activation {
            Activation::Gelu => x.gelu_erf(),
            Activation::GeluNew => x.gelu(),
            Activation::Relu => x.relu(),
            Activation::Silu => x.silu(),
        }
    }
}

struct Layer {
    attention: Attention,
    intermediate: Intermediate,
    output: Output,
}

impl Layer {
    fn new(config: &Config, vb: VarBuilder) -> Result<Layer> {
        let attention = vb.pp("attention");
        Ok(Layer {
            attention: Attention {
                self_: SelfAttention::new(config, attention.pp("self"))?,
                output: Output::new(config.hidden_size, config, attention.pp("output"))?,
            },
            intermediate: Intermediate {
                dense: linear(config.hidden_size, config.intermediate_size, vb.pp("intermediate.dense"))?,
                activation: config.hidden_act,
            },
            output: Output::new(config.intermediate_size, config, vb.pp("output"))?,
        })
    }

    /// The places `of` after this layer, given all places `x` before it.
    fn forward(&self, of: &Tensor, x: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let x = self.attention.output.forward(&self.attention.self_.forward(of, x, mask)?, of)?;
        self.output.forward(&self.intermediate.forward(&x)?, &x)
    }
}

struct Encoder {
    layer: Vec<Layer>,
}

struct Bert {
    embeddings: Embeddings,
    encoder: Encoder,
}

/// A BERT and the head that makes a score of its [CLS] vector.
pub struct Model {
    bert: Bert,
    head: Linear,
    device: Device,
}

/// Name of the head among the tensors.
pub(crate) const HEAD: &str = "head";
/// Prefix of the encoder's tensors.
pub(crate) const ENCODER: &str = "bert";

impl Model {
    /// Takes the tensors from `vb`: the encoder's under `bert.`, the head's under `head.`.
    ///
    /// # Errors
    /// A tensor is missing or has another shape than `config` asks for.
    pub fn new(config: &Config, vb: VarBuilder) -> Result<Model> {
        let encoder = vb.pp(ENCODER);
        let layer =
            (0..config.num_hidden_layers).map(|index| Layer::new(config, encoder.pp(format!("encoder.layer.{index}")))).collect::<Result<_>>()?;
        Ok(Model {
            bert: Bert { embeddings: Embeddings::new(config, encoder.pp("embeddings"))?, encoder: Encoder { layer } },
            head: linear(config.hidden_size, 1, vb.pp(HEAD))?,
            device: vb.device().clone(),
        })
    }

    /// One score per entry, in order, as a vector that has a gradient. Shorter entries are padded to the longest.
    pub fn forward(&self, batch: &[Pieces]) -> Result<Tensor> {
        let mut x = self.embed(batch)?;
        let mask = self.mask(batch)?;
        let last = self.bert.encoder.layer.len() - 1;
        for (index, layer) in self.bert.encoder.layer.iter().enumerate() {
            // Of the last layer only [CLS] is read: there, most of the work can be left out.
            let of = if index == last { x.narrow(1, 0, 1)?.contiguous()? } else { x.clone() };
            x = layer.forward(&of, &x, mask.as_ref())?;
        }
        self.head.forward(&x.squeeze(1)?)?.squeeze(1)
    }

    fn embed(&self, batch: &[Pieces]) -> Result<Tensor> {
        let length = longest(batch);
        let mut ids = Vec::with_capacity(batch.len() * length);
        for pieces in batch {
            ids.extend_from_slice(pieces.ids());
            // What stands at masked places is arbitrary; zero is in every vocabulary.
            ids.resize(ids.len() + length - pieces.len(), 0);
        }
        let x = self.bert.embeddings.forward(&Tensor::from_vec(ids, (batch.len(), length), &self.device)?)?;
        // Training leaves the tables as they are: half of the weights would move for little.
        Ok(x.detach())
    }

    /// What is added to the attention's logits: nothing at pieces, the smallest number at padding. `None` where nothing is padded.
    fn mask(&self, batch: &[Pieces]) -> Result<Option<Tensor>> {
        let length = longest(batch);
        if batch.iter().all(|pieces| pieces.len() == length) {
            return Ok(None);
        }
        let mask: Vec<f32> = batch.iter().flat_map(|pieces| (0..length).map(|at| if at < pieces.len() { 0.0 } else { f32::MIN })).collect();
        Tensor::from_vec(mask, (batch.len(), 1, 1, length), &self.device).map(Some)
    }
}

fn longest(batch: &[Pieces]) -> usize {
    batch.iter().map(Pieces::len).max().unwrap_or(0)
}
