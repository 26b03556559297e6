//! Where bit i of weight j lives: packed layouts of every fracbit scheme, with a scalar reference decoder
