//! The training loop: batches, schedule, clipping, steps, and a file to go on from.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;
use rayon::prelude::*;

use super::encoder::{Encoder, Span, Tape};
use super::loss::{Loss, Target};
use crate::ranker::model::{Activation, Config, HEAD, Model};
use crate::ranker::tokenizer::Pieces;
use crate::ranker::weights;

/// What can be chosen about a training.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Recipe {
    pub loss: Loss,
    /// Passes over the data.
    pub epochs: usize,
    /// Prompts whose pairs are compared with each other.
    pub batch: usize,
    /// Highest learning rate of the encoder; the head, which starts from nothing, learns ten times as fast.
    pub rate: f64,
    /// Share of the steps in which the rate rises to its highest; then it falls to zero in a straight line.
    pub warmup: f64,
    /// Of matrices alone: biases and layer norms are left free.
    pub weight_decay: f64,
    /// Longest gradient, as a norm over all tensors.
    pub clip: f64,
    /// Pairs count if their lengths differ by this share of the longer.
    pub delta: f64,
    /// Prompts of one source that a pass shows at most, drawn anew for every pass.
    pub most: Option<usize>,
    /// Prompts of one source that a pass shows at least; a smaller source is shown up to four times over.
    pub least: usize,
    pub seed: u64,
}

/// One prompt to learn from or to watch.
#[derive(Clone, Debug)]
pub struct Sample {
    pub pieces: Pieces,
    pub target: Target,
    /// Number of the source.
    pub source: usize,
}

/// A small reproducible source of chance (SplitMix64).
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Below `bound`, which is not zero. The bias of the remainder is far below what any use here can notice.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, self.below(index + 1));
        }
    }
}

/// Who computes scores and gradients.
enum Passes {
    /// The encoder made for it.
    Cpu,
    /// candle's graph, wherever it runs: for a GPU, and for activations that it does not know.
    Candle { model: Box<Model>, vars: HashMap<String, Var> },
}

/// A batch to its scores.
type Forward<'a> = Box<dyn Fn(&[Pieces]) -> Result<Vec<f32>> + Sync + 'a>;

/// A model that can be trained: parameters in one slice.
pub struct Trainee {
    config: Config,
    encoder: Encoder,
    passes: Passes,
    parameters: Vec<f32>,
}

/// Prompts per unit of parallel work. Fixed: how gradients are summed must not depend on the number of cores.
const SHARD: usize = 16;

impl Trainee {
    /// From the tensors of a checkpoint; those that `config` does not ask for are left out. Without a head in it, the head starts near zero. The
    /// embeddings stay as they are.
    ///
    /// # Errors
    /// A tensor is missing or has the wrong shape.
    pub fn new(config: &Config, mut tensors: HashMap<String, Tensor>, device: &Device, seed: u64) -> Result<Trainee> {
        let mut chance = Chance::new(seed);
        let head: Vec<f32> = (0..config.hidden_size).map(|_| (chance.below(2001) as f32 / 1000.0 - 1.0) * 0.03).collect();
        tensors.entry(format!("{HEAD}.weight")).or_insert(Tensor::from_vec(head, (1, config.hidden_size), &Device::Cpu)?);
        tensors.entry(format!("{HEAD}.bias")).or_insert(Tensor::zeros(1, DType::F32, &Device::Cpu)?);
        let encoder = Encoder::new(config);
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let mut parameters = Vec::new();
        for span in encoder.tensors() {
            parameters.extend(vb.get(span.shape.as_slice(), &span.name)?.flatten_all()?.to_vec1::<f32>()?);
        }
        let passes =
            if device.is_cpu() && config.hidden_act == Activation::Gelu { Passes::Cpu } else { candle(config, &encoder, &parameters, device)? };
        Ok(Trainee { config: config.clone(), encoder, passes, parameters })
    }

    /// The tensors as they are now.
    pub fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        self.encoder.tensors().iter().map(|span| Ok((span.name.clone(), tensor(span, &self.parameters, &Device::Cpu)?))).collect()
    }

    /// Scores in the order of `samples`.
    pub fn scores(&self, samples: &[Sample]) -> Result<Vec<f64>> {
        let forward: Forward = match &self.passes {
            Passes::Cpu => {
                // As it will serve.
                let encoder = weights::encoder(self.tensors()?.into_iter().collect(), &self.config).map_err(candle_core::Error::wrap)?;
                Box::new(move |batch| encoder.scores(batch).map_err(candle_core::Error::wrap))
            }
            Passes::Candle { model, .. } => Box::new(|batch| model.forward(batch)?.to_vec1()),
        };
        let mut order: Vec<usize> = (0..samples.len()).collect();
        order.sort_by_key(|index| samples[*index].pieces.len());
        let score = |indices: &[usize]| -> Result<Vec<f32>> {
            let batch: Vec<Pieces> = indices.iter().map(|index| samples[*index].pieces.clone()).collect();
            forward(&batch)
        };
        let mut scores = vec![0.0; samples.len()];
        for (indices, found) in order.par_chunks(SHARD).map(|indices| (indices, score(indices))).collect::<Vec<_>>() {
            for (index, score) in indices.iter().zip(found?) {
                scores[*index] = f64::from(score);
            }
        }
        Ok(scores)
    }

    /// The loss of a batch; its gradient goes to `gradients`, the sum of which is meant. `None`: nothing to teach.
    fn gradients(&self, batch: &[Pieces], of: impl Fn(&[f32]) -> Option<(f64, Vec<f32>)>, gradients: &mut [Vec<f32>]) -> Result<Option<f64>> {
        gradients.par_iter_mut().for_each(|gradient| gradient.fill(0.0));
        match &self.passes {
            Passes::Cpu => {
                let tapes: Vec<Tape> = batch.par_chunks(SHARD).map(|shard| self.encoder.forward(&self.parameters, shard)).collect();
                let scores: Vec<f32> = tapes.iter().flat_map(|tape| tape.scores.iter().copied()).collect();
                let Some((loss, slopes)) = of(&scores) else { return Ok(None) };
                gradients
                    .par_iter_mut()
                    .zip(&tapes)
                    .zip(slopes.par_chunks(SHARD))
                    .for_each(|((gradient, tape), slopes)| self.encoder.backward(&self.parameters, tape, slopes, gradient));
                Ok(Some(loss))
            }
            Passes::Candle { model, vars } => {
                let scores = model.forward(batch)?;
                let Some((loss, slopes)) = of(&scores.to_vec1::<f32>()?) else { return Ok(None) };
                let slopes = Tensor::from_vec(slopes, scores.shape(), scores.device())?;
                let found = (scores * slopes)?.sum_all()?.backward()?;
                for span in self.encoder.trained() {
                    if let Some(gradient) = vars.get(&span.name).and_then(|var| found.get(var)) {
                        gradients[0][span.at.clone()].copy_from_slice(&gradient.flatten_all()?.to_vec1::<f32>()?);
                    }
                }
                Ok(Some(loss))
            }
        }
    }

    /// Tells candle's variables the parameters.
    fn publish(&self) -> Result<()> {
        let Passes::Candle { vars, .. } = &self.passes else { return Ok(()) };
        for span in self.encoder.trained() {
            if let Some(var) = vars.get(&span.name) {
                var.set(&tensor(span, &self.parameters, var.device())?)?;
            }
        }
        Ok(())
    }
}

fn tensor(span: &Span, parameters: &[f32], device: &Device) -> Result<Tensor> {
    Tensor::from_slice(&parameters[span.at.clone()], span.shape.as_slice(), device)
}

/// candle's model of these parameters.
fn candle(config: &Config, encoder: &Encoder, parameters: &[f32], device: &Device) -> Result<Passes> {
    let vars: HashMap<String, Var> =
        encoder.tensors().iter().map(|span| Ok((span.name.clone(), Var::from_tensor(&tensor(span, parameters, device)?)?))).collect::<Result<_>>()?;
    let shared = vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
    let model = Box::new(Model::new(config, VarBuilder::from_tensors(shared, DType::F32, device))?);
    Ok(Passes::Candle { model, vars })
}

/// A training under way, one step after the other.
pub struct Training<'a> {
    trainee: Trainee,
    recipe: &'a Recipe,
    samples: &'a [Sample],
    /// Steps done.
    step: usize,
    /// The loss, smoothed.
    loss: f64,
    /// AdamW's running means of the gradient and of its square.
    first: Vec<f32>,
    second: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    /// Indices of the samples of each source.
    sources: Vec<Vec<usize>>,
    /// Indices of the samples in the order of the pass under way.
    order: Vec<usize>,
}

/// Prompts of one source come in runs of this many: a batch of any prompts would mostly tell sources apart, which is easy, and not the prompts of one.
const RUN: usize = 16;
/// How often a pass shows a prompt of a small source at most.
const REPEAT: usize = 4;

/// AdamW's constants.
const BETAS: [f32; 2] = [0.9, 0.999];
const EPSILON: f32 = 1e-8;
/// Elements per unit of parallel work where each element is on its own.
const STRETCH: usize = 1 << 16;

/// Why a training cannot go on from a file.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    #[error("cannot write {path}: {source}", path = path.display())]
    Write { path: std::path::PathBuf, source: std::io::Error },
    #[error("cannot read {path}: {source}", path = path.display())]
    Read { path: std::path::PathBuf, source: std::io::Error },
    #[error("{path} is no checkpoint of a training: {reason}", path = path.display())]
    Format { path: std::path::PathBuf, reason: String },
    #[error("{path} is the checkpoint of another training: data, base or settings differ. Start anew without --resume, or restore them", path = path.display())]
    Other { path: std::path::PathBuf },
}

impl<'a> Training<'a> {
    pub fn new(trainee: Trainee, recipe: &'a Recipe, samples: &'a [Sample]) -> Training<'a> {
        let size = trainee.encoder.trained_size();
        let gradients = (0..recipe.batch.div_ceil(SHARD)).map(|_| vec![0.0; size]).collect();
        let mut sources = vec![Vec::new(); samples.iter().map(|sample| sample.source + 1).max().unwrap_or(0)];
        samples.iter().enumerate().for_each(|(index, sample)| sources[sample.source].push(index));
        let (first, second) = (vec![0.0; size], vec![0.0; size]);
        Training { trainee, recipe, samples, step: 0, loss: 0.0, first, second, gradients, sources, order: Vec::new() }
    }

    /// How many prompts of a source with this many a pass shows.
    fn shown(&self, prompts: usize) -> usize {
        prompts.max(self.recipe.least.min(REPEAT * prompts)).min(self.recipe.most.unwrap_or(usize::MAX))
    }

    /// Steps of one pass. What is left over of a pass is too few to compare.
    pub fn pass(&self) -> usize {
        let shown: usize = self.sources.iter().map(|source| self.shown(source.len())).sum();
        (shown / self.recipe.batch).max(1)
    }

    /// Steps in all.
    pub fn steps(&self) -> usize {
        self.pass() * self.recipe.epochs
    }

    /// Steps done.
    pub fn done(&self) -> usize {
        self.step
    }

    /// The loss of about the last twenty steps.
    pub fn loss(&self) -> f64 {
        self.loss
    }

    pub fn trainee(&self) -> &Trainee {
        &self.trainee
    }

    /// One step.
    ///
    /// # Errors
    /// The device fails.
    pub fn step(&mut self) -> Result<()> {
        let (epoch, at) = (self.step / self.pass(), self.step % self.pass());
        if at == 0 || self.order.is_empty() {
            // From seed and pass alone, so that a training that goes on from a file sees the batches it would have seen.
            let mut chance = Chance::new(self.recipe.seed ^ (epoch as u64 + 1) << 32);
            let mut runs: Vec<Vec<usize>> = Vec::new();
            for source in &self.sources {
                let mut source = source.clone();
                chance.shuffle(&mut source);
                let shown: Vec<usize> = source.iter().copied().cycle().take(self.shown(source.len())).collect();
                runs.extend(shown.chunks(RUN).map(<[usize]>::to_vec));
            }
            chance.shuffle(&mut runs);
            self.order = runs.concat();
        }
        let (from, to) = (at * self.recipe.batch, ((at + 1) * self.recipe.batch).min(self.order.len()));
        let mut batch: Vec<&Sample> = self.order[from..to].iter().map(|index| &self.samples[*index]).collect();
        // Shards of about as many pieces each.
        batch.sort_by_key(|sample| sample.pieces.len());
        let shards = batch.len().div_ceil(SHARD);
        let batch: Vec<&Sample> = (0..shards).flat_map(|shard| batch.iter().skip(shard).step_by(shards).copied()).collect();
        let pieces: Vec<Pieces> = batch.iter().map(|sample| sample.pieces.clone()).collect();
        let targets: Vec<Target> = batch.iter().map(|sample| sample.target).collect();
        let of = |scores: &[f32]| self.recipe.loss.of(scores, &targets, self.recipe.delta);
        let loss = self.trainee.gradients(&pieces, of, &mut self.gradients)?;
        self.step += 1;
        let Some(loss) = loss else { return Ok(()) };
        self.loss = if self.loss == 0.0 { loss } else { 0.95 * self.loss + 0.05 * loss };
        self.descend();
        self.trainee.publish()
    }

    /// AdamW along the gradient, which is shortened to at most the recipe's norm.
    fn descend(&mut self) {
        let rate = self.recipe.rate * schedule(self.step, self.steps(), self.recipe.warmup);
        let (gradient, others) = self.gradients.split_at_mut(1);
        let gradient = &mut gradient[0];
        for other in others {
            gradient
                .par_chunks_mut(STRETCH)
                .zip(other.par_chunks(STRETCH))
                .for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(to, from)| *to += from));
        }
        let squares: Vec<f64> = gradient.par_chunks(STRETCH).map(|part| part.iter().map(|value| f64::from(value * value)).sum()).collect();
        let length = squares.iter().sum::<f64>().sqrt();
        let shorten = (self.recipe.clip / length).min(1.0) as f32;
        let [missing_first, missing_second] = BETAS.map(|beta| 1.0 - beta.powi(self.step as i32));
        for span in self.trainee.encoder.trained() {
            let rate = if span.name.starts_with(HEAD) { rate * 10.0 } else { rate } as f32;
            let kept = if span.shape.len() > 1 { 1.0 - rate * self.recipe.weight_decay as f32 } else { 1.0 };
            let parts = self.trainee.parameters[span.at.clone()].par_chunks_mut(STRETCH).zip(gradient[span.at.clone()].par_chunks(STRETCH));
            let moments = self.first[span.at.clone()].par_chunks_mut(STRETCH).zip(self.second[span.at.clone()].par_chunks_mut(STRETCH));
            parts.zip(moments).for_each(|((parameters, gradient), (first, second))| {
                for (((parameter, gradient), first), second) in parameters.iter_mut().zip(gradient).zip(first).zip(second) {
                    let gradient = gradient * shorten;
                    *first = BETAS[0] * *first + (1.0 - BETAS[0]) * gradient;
                    *second = BETAS[1] * *second + (1.0 - BETAS[1]) * gradient * gradient;
                    *parameter = *parameter * kept - rate * (*first / missing_first) / ((*second / missing_second).sqrt() + EPSILON);
                }
            });
        }
    }
}

/// Names of what a checkpoint holds.
const PARTS: [&str; 3] = ["parameters", "first", "second"];

/// Where a checkpoint was taken, as its metadata say.
#[derive(serde::Serialize, serde::Deserialize)]
struct Mark {
    step: usize,
    loss: f64,
    /// Hash of everything that decides what the next step does.
    training: String,
}

impl Training<'_> {
    /// Writes everything that the next step depends on; the file appears whole or not at all.
    ///
    /// # Errors
    /// [`ResumeError::Write`].
    pub fn save(&self, path: &Path) -> std::result::Result<(), ResumeError> {
        let failed = |source| ResumeError::Write { path: path.into(), source };
        let trained = &self.trainee.parameters[..self.first.len()];
        let bytes: Vec<Vec<u8>> =
            [trained, &self.first, &self.second].map(|values| values.iter().flat_map(|value| value.to_le_bytes()).collect()).into();
        let views = PARTS
            .iter()
            .zip(&bytes)
            .map(|(name, bytes)| Ok((*name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![bytes.len() / 4], bytes)?)))
            .collect::<std::result::Result<Vec<_>, safetensors::SafeTensorError>>()
            .map_err(|error| failed(std::io::Error::other(error)))?;
        let mark = Mark { step: self.step, loss: self.loss, training: self.name() };
        let mark = serde_json::to_string(&mark).map_err(|error| failed(error.into()))?;
        let file =
            safetensors::serialize(views, Some(HashMap::from([("mark".to_owned(), mark)]))).map_err(|error| failed(std::io::Error::other(error)))?;
        let beside = path.with_extension("part");
        // On the disk before it takes the old one's name: a crash in between leaves one whole file.
        let written = std::fs::File::create(&beside).and_then(|mut part| part.write_all(&file).and_then(|()| part.sync_all()));
        written.and_then(|()| std::fs::rename(&beside, path)).map_err(failed)
    }

    /// Goes on where [`Training::save`] left off: the result is the one that an uninterrupted training would have had, to the bit.
    ///
    /// # Errors
    /// The file cannot be read, is none or was written by a training of other data, another base or other settings.
    pub fn resume(&mut self, path: &Path) -> std::result::Result<(), ResumeError> {
        let broken = |reason: String| ResumeError::Format { path: path.into(), reason };
        let file = std::fs::read(path).map_err(|source| ResumeError::Read { path: path.into(), source })?;
        let (_, header) = safetensors::SafeTensors::read_metadata(&file).map_err(|error| broken(error.to_string()))?;
        let mark = header.metadata().as_ref().and_then(|metadata| metadata.get("mark")).ok_or_else(|| broken("it has no mark".into()))?;
        let mark: Mark = serde_json::from_str(mark).map_err(|error| broken(error.to_string()))?;
        if mark.training != self.name() {
            return Err(ResumeError::Other { path: path.into() });
        }
        let tensors = safetensors::SafeTensors::deserialize(&file).map_err(|error| broken(error.to_string()))?;
        let trained = &mut self.trainee.parameters[..self.first.len()];
        for (name, values) in PARTS.iter().zip([trained, &mut self.first[..], &mut self.second[..]]) {
            let stored = tensors.tensor(name).map_err(|error| broken(error.to_string()))?;
            let (stored, _) = stored.data().as_chunks::<4>();
            if stored.len() != values.len() {
                return Err(broken(format!("{name} has {} numbers, not {}", stored.len(), values.len())));
            }
            values.iter_mut().zip(stored).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
        }
        (self.step, self.loss) = (mark.step, mark.loss);
        self.order.clear();
        self.trainee.publish().map_err(|error| broken(error.to_string()))
    }

    /// A hash of recipe, data and the weights that stay as they are.
    fn name(&self) -> String {
        let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
        hash.update(format!("{:?}", self.recipe).as_bytes());
        for sample in self.samples {
            hash.update(format!("{:?}", sample).as_bytes());
        }
        for span in self.trainee.encoder.tensors() {
            hash.update(format!("{} {:?}", span.name, span.shape).as_bytes());
        }
        self.trainee.parameters[self.first.len()..].iter().for_each(|value| hash.update(&value.to_le_bytes()));
        hash.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The share of the highest rate at this step, counted from 1.
fn schedule(step: usize, steps: usize, warmup: f64) -> f64 {
    let (step, steps) = (step as f64, steps as f64);
    let rise = (steps * warmup).max(1.0);
    (step / rise).min((steps - step + 1.0) / (steps - rise).max(1.0)).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranker::weights::tests::{TINY, tiny_tensors};
    use crate::training::metrics::agreement;

    fn trainee() -> Trainee {
        Trainee::new(&TINY, tiny_tensors(3), &Device::Cpu, 1).unwrap()
    }

    /// Prompts whose length is told by how many of their pieces are a certain word.
    fn samples() -> Vec<Sample> {
        let mut chance = Chance::new(5);
        (0..64)
            .map(|_| {
                let mut ids = vec![2];
                ids.extend((0..4 + chance.below(4)).map(|_| if chance.below(2) == 0 { 13 } else { 8 }));
                let long = ids.iter().filter(|id| **id == 13).count();
                Sample { pieces: Pieces::of_ids(ids), target: Target { length: long as f64, group: 0 }, source: 0 }
            })
            .collect()
    }

    fn recipe() -> Recipe {
        Recipe {
            loss: Loss::Pairwise,
            epochs: 16,
            batch: 20,
            rate: 3e-3,
            warmup: 0.1,
            weight_decay: 0.01,
            clip: 1.0,
            delta: 0.2,
            most: None,
            least: 0,
            seed: 1,
        }
    }

    #[test]
    fn the_encoder_agrees_with_the_reference_about_scores_and_every_gradient() {
        let config = Config { num_hidden_layers: 3, ..TINY };
        let mut tensors = tiny_tensors(3);
        let third: Vec<(String, Tensor)> = tensors
            .iter()
            .filter(|(name, _)| name.contains("layer.0."))
            .map(|(name, tensor)| (name.replace("layer.0.", "layer.2."), tensor.clone()))
            .collect();
        tensors.extend(third);
        let fast = Trainee::new(&config, tensors.clone(), &Device::Cpu, 1).unwrap();
        let slow = candle(&config, &fast.encoder, &fast.parameters, &Device::Cpu).unwrap();
        let slow = Trainee { config: config.clone(), encoder: Encoder::new(&config), passes: slow, parameters: fast.parameters.clone() };
        // Two shards and a bit, of different lengths.
        let samples = &samples()[..37];
        let batch: Vec<Pieces> = samples.iter().map(|sample| sample.pieces.clone()).collect();
        let (quick, exact) = (fast.scores(samples).unwrap(), slow.scores(samples).unwrap());
        assert!(quick.iter().zip(&exact).all(|(quick, exact)| (quick - exact).abs() < 1e-4), "{quick:?} and {exact:?}");

        let slopes: Vec<f32> = (0..batch.len()).map(|index| (index as f32 * 1.7).sin()).collect();
        let sum = |trainee: &Trainee| {
            let mut gradients = vec![vec![0.0; trainee.encoder.trained_size()]; 3];
            assert_eq!(trainee.gradients(&batch, |_| Some((1.0, slopes.clone())), &mut gradients).unwrap(), Some(1.0));
            (0..trainee.encoder.trained_size()).map(|index| gradients.iter().map(|gradient| gradient[index]).sum()).collect::<Vec<f32>>()
        };
        let (quick, exact) = (sum(&fast), sum(&slow));
        for span in fast.encoder.trained() {
            let most = exact[span.at.clone()].iter().map(|value| value.abs()).fold(0.0, f32::max);
            for index in span.at.clone() {
                let (quick, exact) = (quick[index], exact[index]);
                assert!((quick - exact).abs() < 2e-3 * most + 2e-7, "{}[{}]: {quick}, not {exact}", span.name, index - span.at.start);
            }
            // Of the key's bias no attention depends: a constant in every logit of a row cancels in the softmax.
            assert!(most > 1e-6 || span.name.ends_with("key.bias"), "{}: {most}", span.name);
        }
    }

    #[test]
    fn gradients_are_those_of_finite_differences() {
        let mut trainee = trainee();
        let batch: Vec<Pieces> = [vec![2, 8, 13, 9], vec![2, 10]].map(Pieces::of_ids).into();
        let mut gradients = vec![vec![0.0; trainee.encoder.trained_size()]];
        trainee.gradients(&batch, |scores| Some((0.0, vec![1.0; scores.len()])), &mut gradients).unwrap();
        for name in ["bert.encoder.layer.0.attention.self.query.weight", "bert.encoder.layer.0.output.LayerNorm.weight", "head.weight"] {
            let index = trainee.encoder.tensors().iter().find(|span| span.name == name).unwrap().at.start + 3;
            let mut at = |by: f32| {
                trainee.parameters[index] += by;
                let sum: f32 = trainee.encoder.forward(&trainee.parameters, &batch).scores.iter().sum();
                trainee.parameters[index] -= by;
                sum
            };
            let (numeric, gradient) = ((at(1e-2) - at(-1e-2)) / 2e-2, gradients[0][index]);
            assert!((numeric - gradient).abs() < 2e-2 * gradient.abs().max(0.5), "{name}: {numeric} and {gradient}");
        }
    }

    #[test]
    fn training_learns_an_order_and_a_seed_repeats_it() {
        let samples = samples();
        let recipe = recipe();
        let trained = || {
            let mut training = Training::new(trainee(), &recipe, &samples[..48]);
            while training.done() < training.steps() {
                training.step().unwrap();
            }
            training.trainee().scores(&samples).unwrap()
        };
        let scores = trained();
        let lengths: Vec<f64> = samples.iter().map(|sample| sample.target.length).collect();
        let tau = agreement(&scores[48..], &lengths[48..], 0.2).tau;
        assert!(tau > 0.7, "{tau}");
        assert_eq!(scores, trained());
    }

    #[test]
    fn a_training_goes_on_from_a_file_as_if_nothing_had_happened() {
        let (samples, recipe) = (samples(), Recipe { epochs: 4, ..recipe() });
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("checkpoint.safetensors");
        let mut whole = Training::new(trainee(), &recipe, &samples);
        let stop = whole.pass() + 1;
        while whole.done() < whole.steps() {
            if whole.done() == stop {
                whole.save(&path).unwrap();
            }
            whole.step().unwrap();
        }
        let mut resumed = Training::new(trainee(), &recipe, &samples);
        resumed.resume(&path).unwrap();
        assert_eq!(resumed.done(), stop);
        while resumed.done() < resumed.steps() {
            resumed.step().unwrap();
        }
        assert_eq!(resumed.trainee.parameters, whole.trainee.parameters);

        let other = Recipe { rate: 1e-3, ..recipe.clone() };
        assert!(matches!(Training::new(trainee(), &other, &samples).resume(&path), Err(ResumeError::Other { .. })));
        assert!(matches!(Training::new(trainee(), &recipe, &samples[1..]).resume(&path), Err(ResumeError::Other { .. })));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        assert!(matches!(resumed.resume(&path), Err(ResumeError::Format { .. })));
        assert!(matches!(resumed.resume(&directory.path().join("none")), Err(ResumeError::Read { .. })));
    }

    #[test]
    fn a_pass_shows_no_source_too_often_and_none_too_rarely() {
        let mut samples = samples();
        samples.iter_mut().enumerate().for_each(|(index, sample)| sample.source = if index < 3 { 0 } else { 1 + index % 2 });
        let recipe = Recipe { most: Some(20), least: 15, batch: 10, ..recipe() };
        let mut training = Training::new(trainee(), &recipe, &samples);
        // 3, 30 and 31 prompts: four times over, and twice the most.
        assert_eq!(training.pass(), (12 + 20 + 20) / 10);
        training.step().unwrap();
        let shown = |source| training.order.iter().filter(|index| samples[**index].source == source).count();
        assert_eq!([0, 1, 2].map(shown), [12, 20, 20]);
        let first = training.order.clone();
        (0..training.pass()).for_each(|_| training.step().unwrap());
        assert_ne!(first, training.order);
    }

    #[test]
    fn the_rate_rises_then_falls_to_almost_nothing() {
        let rates: Vec<f64> = (1..=100).map(|step| schedule(step, 100, 0.1)).collect();
        assert!((rates[4] - 0.5).abs() < 1e-9 && (rates[9] - 1.0).abs() < 1e-9 && rates[99] < 0.02, "{rates:?}");
        assert!(rates[10..].is_sorted_by(|a, b| a >= b));
    }
}
