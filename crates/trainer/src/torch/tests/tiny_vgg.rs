//! A small VGG (Simonyan & Zisserman 2014, arXiv 1409.1556) with BatchNorm.

use baton_model::{Builder, Layer, NetworkDescription, NetworkOptions, builder::Conv};

pub(crate) fn describe(options: &NetworkOptions) -> NetworkDescription {
    let mut network = Builder::images();
    let mut inputs = options.channels;
    for (number, outputs) in (1..).zip([16, 32, 64]) {
        network.block(&format!("stage{number}"));
        let (conv, norm) = (format!("stage{number}.conv"), format!("stage{number}.norm"));
        network.conv_norm(Conv { inputs, outputs, side: 3, ..Conv::new(&conv, &norm) });
        network.push(Layer::MaxPool { side: 2, stride: 2 });
        inputs = outputs;
    }
    network.block("head");
    network.push(Layer::GlobalMean);
    network.linear("fc", inputs, options.outputs);
    network.finish()
}
